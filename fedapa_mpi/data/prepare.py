"""Rank 0's work before a run: read the data set, spread it over the clients, describe it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedapa_mpi.data import datasets, faults, federation, fedfile, groups, hashes, partition
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.recovery import Truth, alike, blocks

if TYPE_CHECKING:
    from fedapa_mpi.config import RunConfig

log = logging.getLogger(__name__)

BLOCKS = ("pathological", "pfllib-pat")  # partitions in which clients share sets of classes


@dataclass(frozen=True)
class Federation:
    """The clients' data and what results and checkpoints say of them."""

    shards: Sequence[Shard]  # by client
    classes: int
    input_shape: tuple[int, ...]
    labels: np.ndarray  # [M, C] training samples by class
    test_samples: np.ndarray  # [M]
    partition_hash: str
    data_hash: str
    truth: Truth | None = None  # who belongs together, if that is known
    groups: np.ndarray | None = None  # [M] the group of each client, if there are groups
    file: str | None = None  # where every rank can read its own shards

    @property
    def sizes(self) -> list[int]:
        """Training samples of each client."""
        sizes: list[int] = self.labels.sum(axis=1).tolist()
        return sizes


class FileShards(Sequence[Shard]):
    """The clients of a federation file, each read when it is asked for."""

    def __init__(self, path: str, clients: int) -> None:
        self._path, self._clients = path, clients

    def __len__(self) -> int:
        return self._clients

    def __getitem__(self, client):  # type: ignore[no-untyped-def]  # a slice or a number
        if isinstance(client, slice):
            return [self[i] for i in range(self._clients)[client]]
        return read_shard(self._path, range(self._clients)[client])

    def __iter__(self) -> Iterator[Shard]:
        with fedfile.reading(self._path) as file:
            for i in range(self._clients):
                yield _shard(file.client(i))


def read_shard(path: str, client: int) -> Shard:
    """One client of a federation file. Raises ValueError or OSError if it cannot be had."""
    with fedfile.reading(path) as file:
        return _shard(file.client(client))


def prepare(run: RunConfig) -> Federation:
    """Loads and partitions the run's data set, or looks into its federation file.

    Raises:
        ValueError: the partition cannot exist, or the file cannot be used.
        OSError: the files of the data set are not to be had.
    """
    if fedfile.is_path(run.dataset):
        return _from_file(run)
    return _grouped(run) if run.dataset == "groups" else _partitioned(run)


def _partitioned(run: RunConfig) -> Federation:
    data = datasets.load(run.dataset, run.data_dir)
    parts = partition.split(
        run.partition,
        data.y_train,
        data.y_test,
        clients=run.clients + run.holdout_clients,
        seed=run.seed,
        alpha=run.alpha,
        classes_per_client=run.classes_per_client,
        assignment=run.assignment,
        balance=run.balance,
        min_train=run.min_train,
        min_test=run.min_test,
        fraction=run.fraction,
    )
    dealt = federation.shards(data, parts)
    pool, _ = parts.sources(data.y_train, data.y_test)
    labels = partition.class_counts(pool, parts.train, data.classes)
    unused = np.setdiff1d(data.y_train, np.flatnonzero(labels.sum(axis=0)))
    if unused.size:
        names = ", ".join(map(str, unused))
        log.warning("partition %s: nobody has a sample of classes %s", run.partition, names)
    return Federation(
        dealt,
        data.classes,
        tuple(data.input_shape),
        labels,
        np.array([shard.n_test for shard in dealt]),
        parts.hash(),
        federation.data_hash(dealt),
        Truth("with the same classes", blocks(labels)) if run.partition in BLOCKS else None,
    )


def _grouped(run: RunConfig) -> Federation:
    group_of = groups.members(run.clients + run.holdout_clients, run.groups, run.seed)
    dealt = [
        _group_shard(run, int(group), client) for client, group in enumerate(group_of.tolist())
    ]
    return Federation(
        dealt,
        groups.CLASSES,
        (groups.FEATURES,),
        _class_counts((shard.y.numpy() for shard in dealt), groups.CLASSES),
        np.array([shard.n_test for shard in dealt]),
        groups.membership_hash(group_of),
        federation.data_hash(dealt),
        Truth("of the same group", alike(group_of)),
        group_of,
    )


def _group_shard(run: RunConfig, group: int, client: int) -> Shard:
    data = groups.draw(
        group, client, samples=run.group_samples, noise=run.group_noise, seed=run.seed
    )
    x, y, x_test, y_test = (torch.from_numpy(array) for array in vars(data).values())
    # unit variance over classes and noise together
    scale = (1 + run.group_noise**2) ** 0.5
    return Shard(x, y, x_test, y_test, groups.CLASSES, scale, (0.0,), (1.0,))


def _from_file(run: RunConfig) -> Federation:
    faults.refuse_faulty(run.dataset)
    with fedfile.reading(run.dataset) as file:
        _check_clients(run, len(file))
        head, M = file.header, len(file)
        labels = _class_counts((file.labels(i, "train") for i in range(M)), head.classes)
        return Federation(
            FileShards(run.dataset, M),
            head.classes,
            head.input_shape,
            labels,
            np.array([len(file.labels(i, "test")) for i in range(M)]),
            head.partition_hash,
            hashes.federation_hash(file.hash(i) for i in range(M)),
            _truth(file, labels),
            file.groups,
            run.dataset,
        )


def _check_clients(run: RunConfig, held: int) -> None:
    if run.clients + run.holdout_clients != held:
        outside = f" beside {run.holdout_clients} holdout_clients" if run.holdout_clients else ""
        raise ValueError(
            f"clients is {run.clients}{outside}, but {run.dataset} holds {held}: leave --clients "
            "away, or name a file with as many"
        )


def _truth(file: fedfile.FederationFile, labels: np.ndarray) -> Truth | None:
    if file.groups is not None:
        return Truth("of the same group", alike(file.groups))
    return (
        Truth("with the same classes", blocks(labels)) if file.header.partition in BLOCKS else None
    )


def _class_counts(labels: Iterator[np.ndarray], classes: int) -> np.ndarray:  # [M, C]
    return np.stack([np.bincount(y, minlength=classes) for y in labels])


def _shard(arrays: fedfile.Arrays) -> Shard:
    return Shard.from_message({name: torch.from_numpy(array) for name, array in arrays.items()})

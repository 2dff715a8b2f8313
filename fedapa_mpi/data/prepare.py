"""Rank 0's work before a run: read the data set, spread it over the clients, describe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedapa_mpi.data import datasets, federation, partition

if TYPE_CHECKING:
    from fedapa_mpi.config import RunConfig


@dataclass(frozen=True)
class Federation:
    """The clients' data and what results and checkpoints say of them."""

    shards: list[federation.Shard]  # by client
    classes: int
    input_shape: tuple[int, ...]
    labels: np.ndarray  # [M, C] training samples by class
    test_samples: np.ndarray  # [M]
    partition_hash: str
    data_hash: str

    @property
    def sizes(self) -> list[int]:
        """Training samples of each client."""
        return [shard.n for shard in self.shards]


def prepare(run: RunConfig) -> Federation:
    """Loads and partitions the run's data set.

    Raises:
        ValueError: the partition cannot exist.
        OSError: the files of the data set are not to be had.
    """
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
        min_train=run.min_train,
        min_test=run.min_test,
        fraction=run.fraction,
    )
    shards = federation.shards(data, parts)
    return Federation(
        shards,
        data.classes,
        tuple(data.input_shape),
        partition.class_counts(data.y_train, parts.train, data.classes),
        np.array([shard.n_test for shard in shards]),
        parts.hash(),
        federation.data_hash(shards),
    )

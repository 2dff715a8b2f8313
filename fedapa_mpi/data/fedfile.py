"""A federation as one HDF5 file: the way to bring one's own data, and what `export` writes.

    /clients/0000/train/x [n, ...] uint8 or float32    /clients/0000/train/y [n] integers 0 .. C-1
    /clients/0000/test/x                               /clients/0000/test/y
    /clients/0001/...                                  four digits or more, no number left out
    /groups [M] integers: who belongs together, if that is known

Attributes of the root: `format` = 1, `classes` = C, `input_shape` of one sample; optional are
`scale`, `mean` and `std` (numbers, or lists with one per channel; x becomes (x / scale - mean) /
std, without them it stays as it is), `clients` = M, `name`, `class_names`, `partition` and
`partition_hash`. Attribute `sha256` of a client, optional: hashes.client_hash of what it holds.

Only numpy and h5py are needed here. Who reads: rank 0 what it must know of all clients, every
other rank its own clients.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedapa_mpi.data.hashes import client_hash

FORMAT = 1
SUFFIXES = (".h5", ".hdf5")
SPLITS = ("train", "test")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Header:
    """What the root attributes say."""

    classes: int
    input_shape: tuple[int, ...]
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)  # one per channel, or one for all
    std: tuple[float, ...] = (1.0,)
    name: str = ""  # of the data set
    class_names: tuple[str, ...] = ()
    partition: str = ""  # how it was made, if it was made from one data set
    partition_hash: str = ""

    def message(self, x: Arrays) -> Arrays:
        """`x`, `y`, `x_test` and `y_test` with classes and normalisation, as Shard.message."""
        normalisation = np.array([self.scale, *self.mean, *self.std], np.float64)
        return {**x, "classes": np.array([self.classes]), "normalisation": normalisation}


class FederationFile:
    """A federation file that is open for reading; what it holds was looked over by faults.py."""

    def __init__(self, h5: h5py.File, path: str) -> None:
        self.path = path
        self.header = header(h5)
        self._clients = h5["clients"]
        self.groups: np.ndarray | None = h5["groups"][:] if "groups" in h5 else None  # [M]

    def __len__(self) -> int:
        return len(self._clients)

    def labels(self, client: int, split: str) -> np.ndarray:
        """The labels of a client's training or test samples, int64."""
        return self._clients[f"{name_of(client)}/{split}/y"][:].astype(np.int64)

    def arrays(self, client: int) -> Arrays:
        """All of one client as it is, named as in Shard.message."""
        group = self._clients[name_of(client)]
        x = {"x": group["train/x"][:], "y": self.labels(client, "train")}
        x |= {"x_test": group["test/x"][:], "y_test": self.labels(client, "test")}
        return self.header.message(x)

    def changed(self, client: int, arrays: Arrays) -> bool:
        """Whether a client's `arrays` are not what its attribute sha256 says."""
        stored = self._sha256(client)
        return stored is not None and stored != client_hash(arrays)

    def client(self, client: int) -> Arrays:
        """`arrays`, checked. Raises ValueError for changed or non-finite content."""
        arrays = self.arrays(client)
        for place, name in (("train/x", "x"), ("test/x", "x_test")):
            if not_finite(arrays[name]).size:
                raise ValueError(f"{self.path}: client {client}, {place} holds NaN or infinity")
        if self.changed(client, arrays):
            raise ValueError(
                f"{self.path}: client {client} is not what its attribute sha256 says: the file is "
                "damaged or was changed; make it again, or delete that attribute if the change "
                "was meant"
            )
        return arrays

    def hash(self, client: int) -> str:
        """hashes.client_hash of one client; if the file does not say it, from what it holds."""
        return self._sha256(client) or client_hash(self.client(client))

    def _sha256(self, client: int) -> str | None:
        stored = self._clients[name_of(client)].attrs.get("sha256")
        return None if stored is None else _string(stored)


def name_of(client: int) -> str:
    """The name of a client's HDF5 group."""
    return f"{client:04d}"


def is_path(dataset: str) -> bool:
    """Whether the name of a data set is that of a federation file."""
    return dataset.endswith(SUFFIXES)


@contextmanager
def hdf5(path: str | Path) -> Iterator[h5py.File]:
    """Opens a file for reading; several ranks may at once.

    Raises ValueError if it is not there, or no HDF5 file, or cannot be read.
    """
    try:
        h5 = h5py.File(path, "r", locking=False)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there: check the path; every rank must be able to read it, so put it "
            "into a folder that all nodes share"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read as HDF5 ({error}): make it with python -m fedapa_mpi.data "
            "export, or look at its permissions"
        ) from error
    with h5:
        yield h5


@contextmanager
def reading(path: str | Path) -> Iterator[FederationFile]:
    """A federation file whose structure has been looked over before."""
    with hdf5(path) as h5:
        yield FederationFile(h5, str(path))


def defaults(path: str, held_out: int = 0) -> dict[str, Any]:
    """Run defaults that belong to a file: the clients that it holds, a model that takes its input.

    Raises ValueError if it cannot be used, and as `hdf5`.
    """
    with hdf5(path) as h5:
        found = h5.get("clients")
        clients = len(found) if isinstance(found, h5py.Group) else 0
        shape = np.atleast_1d(h5.attrs.get("input_shape", []))
    if not clients:
        raise ValueError(f"{path} holds no group /clients: see python -m fedapa_mpi.data --help")
    if clients <= held_out:
        raise ValueError(
            f"holdout_clients is {held_out}, expected less than {clients}, the clients in {path}"
        )
    image = len(shape) == 3 and min(shape[1:]) >= 16
    return {"clients": clients - held_out, "model": "lenet5" if image else "mlp"}


def header(h5: h5py.File) -> Header:
    """The root attributes; those that are missing have their default."""
    attributes = h5.attrs
    known: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        if name in attributes:
            known[name] = kind(np.ravel(attributes[name])[0])
    for name, kind in _LISTS.items():
        if name in attributes:
            known[name] = tuple(kind(value) for value in np.ravel(attributes[name]))
    return Header(**known)


def _string(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "classes": int,
    "scale": float,
    "name": _string,
    "partition": _string,
    "partition_hash": _string,
}
_LISTS: dict[str, Callable[[Any], Any]] = {
    "input_shape": int,
    "mean": float,
    "std": float,
    "class_names": _string,
}


def not_finite(x: np.ndarray) -> np.ndarray:
    """Positions of NaN and infinity in the flattened array."""
    return np.flatnonzero(~np.isfinite(x)) if x.dtype.kind == "f" else np.empty(0, np.int64)


def check_new(path: str | Path) -> Path:
    """The path of a file to be. Raises ValueError if there is one already, or no such folder."""
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists: choose another name, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder: make it first, or choose another name")
    return path


def write(
    path: str | Path,
    head: Header,
    clients: Iterable[Mapping[str, np.ndarray]],
    groups: np.ndarray | None = None,
) -> None:
    """Write a federation, client after client; the file appears under its name when it is whole.

    `clients` hold `x`, `y`, `x_test` and `y_test`. Raises ValueError if there is such a file.
    """
    path = check_new(path)
    part = path.with_name(path.name + ".part")
    try:
        with h5py.File(part, "w") as h5:
            h5.attrs.update(_attributes(head))
            if groups is not None:
                h5["groups"] = groups
            count = 0
            for count, arrays in enumerate(clients, start=1):
                _write_client(h5.create_group(f"clients/{name_of(count - 1)}"), head, arrays)
            h5.attrs["clients"] = count
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _attributes(head: Header) -> dict[str, Any]:
    given = {name: value for name, value in vars(head).items() if value not in ("", ())}
    for name in ("mean", "std"):
        given[name] = np.array(given[name], np.float64)
    given["input_shape"] = np.array(head.input_shape, np.int64)
    if head.class_names:
        given["class_names"] = np.array(head.class_names, h5py.string_dtype())
    return {"format": FORMAT, **given}


def _write_client(group: h5py.Group, head: Header, arrays: Mapping[str, np.ndarray]) -> None:
    ours = {name: arrays[name] for name in ("x", "y", "x_test", "y_test")}
    for name, array in ours.items():
        field, _, test = name.partition("_")
        group[f"{test or 'train'}/{field}"] = array
    group.attrs["sha256"] = client_hash(head.message(ours))

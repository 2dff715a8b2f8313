"""Data sets as arrays in memory. Everything here runs on rank 0 only; clients get shards.

A data set is one entry in `_LOADERS`; sets that live in files also describe those in a `Source`.
scikit-learn and torchvision take seconds to import, so they are imported where they are needed.
"""

import gzip
import logging
import math
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

CACHE = Path(
    "~/.cache/fedapa-mpi"
)  # downloads go here when neither --data_dir nor FEDAPA_DATA is set
DOWNLOAD_TIMEOUT = 20.0  # seconds of silence; compute nodes often drop packets instead of refusing

# Run defaults that differ from the general ones, by data set.
DEFAULTS: dict[str, dict[str, object]] = {
    "digits": {"model": "mlp", "rounds": 60, "batch_size": 16, "lr": 0.05},
    "fmnist": {"model": "lenet5"},
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples as they are stored, and how to normalise them: (x / scale - mean) / std."""

    name: str
    x_train: np.ndarray  # uint8, images [N, channels, H, W] or vectors [N, D]
    y_train: np.ndarray  # int64 [N]
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    scale: float
    mean: tuple[float, ...]  # one per channel, or one for all
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, e.g. (1, 28, 28)."""
        return self.x_train.shape[1:]


@dataclass(frozen=True)
class Source:
    """Where the files of a data set may lie and where to get them."""

    title: str
    files: tuple[str, ...]  # plain, or with .gz
    folder: str  # where torchvision puts them below its root
    torchvision_class: str
    system: Path | None = None  # the distribution's own copy
    package: str = ""  # what a user installs to have it

    def download(self, root: Path) -> None:
        """Fetch the files into root / folder. Raises OSError or RuntimeError if that fails."""
        import torchvision.datasets

        with _socket_timeout(DOWNLOAD_TIMEOUT):
            getattr(torchvision.datasets, self.torchvision_class)(str(root), download=True)


FASHION_MNIST = Source(
    title="Fashion-MNIST",
    files=(
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ),
    folder="FashionMNIST/raw",
    torchvision_class="FashionMNIST",
    system=Path("/usr/share/datasets/fashion-mnist"),
    package="Debian package dataset-fashion-mnist",
)


def names() -> tuple[str, ...]:
    """The built-in data sets."""
    return tuple(_LOADERS)


def load(name: str, data_dir: str | None = None) -> Dataset:
    """Read a data set into memory. Only for rank 0: it may download, and it holds all samples.

    Files are looked for in `data_dir`, $FEDAPA_DATA, the distribution's folder and the cache, then
    downloaded through torchvision. The result does not depend on any seed.

    Raises ValueError for an unknown name or a damaged file, FileNotFoundError if there is no copy
    and no network.
    """
    if name not in _LOADERS:
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(names())}")
    return _LOADERS[name](data_dir)


def _digits(data_dir: str | None) -> Dataset:
    """The 1797 8x8 digits that ship with scikit-learn, as vectors of 64 values from 0 to 16."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    # random_state is fixed: the data set is the same for every seed, only its partition is not.
    x_train, x_test, y_train, y_test = train_test_split(
        x.astype(np.uint8), y.astype(np.int64), test_size=0.25, stratify=y, random_state=0
    )
    return Dataset(
        "digits", x_train, y_train, x_test, y_test, classes=10, scale=16.0, mean=(0.5,), std=(0.5,)
    )


def _fmnist(data_dir: str | None) -> Dataset:
    """Fashion-MNIST: 60000 + 10000 images of 28x28 pixels (Xiao et al., arXiv 1708.07747)."""
    return _idx_dataset("fmnist", FASHION_MNIST, data_dir)


_LOADERS: dict[str, Callable[[str | None], Dataset]] = {"digits": _digits, "fmnist": _fmnist}


# ---------------------------------------------------------------------------- finding the files


def locate(source: Source, data_dir: str | None = None) -> list[Path]:
    """The paths of source.files, in that order; downloads them when no copy is found.

    Raises FileNotFoundError that names every place searched and how to get the files.
    """
    places = _places(source, data_dir)
    for place in places:
        if found := _files_in(place, source):
            if data_dir and place != places[0]:
                log.warning("%s is not in --data_dir %s: using %s", source.title, data_dir, place)
            return found
    root = _download_root(data_dir)
    try:
        source.download(root)
    except (OSError, RuntimeError, ImportError) as error:
        raise FileNotFoundError(_not_found(source, places, root, error)) from error
    if found := _files_in(root, source):
        return found
    raise FileNotFoundError(_not_found(source, places, root, "the files are not there afterwards"))


def _places(source: Source, data_dir: str | None) -> list[Path]:
    """The folders to search, in order."""
    given = [data_dir, os.environ.get("FEDAPA_DATA"), source.system, CACHE]
    return [_expanded(place) for place in given if place]


def _download_root(data_dir: str | None) -> Path:
    """The first folder that the user named, else the cache."""
    return _expanded(data_dir or os.environ.get("FEDAPA_DATA") or CACHE)


def _expanded(place: str | Path) -> Path:
    """With ~ replaced; unlike Path.expanduser it survives a container user without a home."""
    return Path(os.path.expanduser(place))


def _files_in(place: Path, source: Source) -> list[Path] | None:
    """All files of the set, directly in `place` or in torchvision's layout; None if some lack."""
    for folder in (place, place / source.folder):
        found = [_plain_or_gz(folder / file) for file in source.files]
        if complete := [path for path in found if path]:
            missing = [file for file, path in zip(source.files, found) if not path]
            if not missing:
                return complete
            log.warning("%s: %s is incomplete: no %s", source.title, folder, ", ".join(missing))
    return None


def _plain_or_gz(path: Path) -> Path | None:
    # os.path.isfile, because Path.is_file raises in a folder that this user may not enter.
    packed = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, packed) if os.path.isfile(candidate)), None)


def _not_found(source: Source, places: list[Path], root: Path, reason: object) -> str:
    searched = ", ".join(f"{place} and {place / source.folder}" for place in places)
    reason = " ".join(str(reason).split())  # torchvision's message has several lines
    package = f"install the {source.package}, or " if source.package else ""
    return (
        f"{source.title}: no copy found in {searched}; the download into {root} failed "
        f"({reason}). To get it: {package}copy {', '.join(source.files)} (plain or "
        ".gz) into a folder and name that with --data_dir or FEDAPA_DATA"
    )


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision sets no timeout: without one a silent network would stop the run for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# ---------------------------------------------------------------------------- reading IDX files


def _idx_dataset(name: str, source: Source, data_dir: str | None) -> Dataset:
    """A set of 10 classes of grey images in four IDX files (MNIST's format)."""
    paths = locate(source, data_dir)
    x_train, y_train = _idx_pair(paths[0], paths[1])
    x_test, y_test = _idx_pair(paths[2], paths[3])
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"{paths[2]} holds images of shape {x_test.shape[1:]}, {paths[0]} of "
            f"{x_train.shape[1:]}: the files belong to different data sets, get them again"
        )
    return Dataset(
        name, x_train, y_train, x_test, y_test, classes=10, scale=255.0, mean=(0.5,), std=(0.5,)
    )


def _idx_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images as uint8 [N, 1, H, W] and their labels as int64 [N]."""
    x = read_idx(images, 3)
    y = read_idx(labels, 1)
    if len(x) != len(y):
        raise ValueError(
            f"{images} holds {len(x)} images, but {labels} {len(y)} labels: get both again"
        )
    if y.max(initial=0) > 9:
        raise ValueError(f"{labels} holds the label {y.max()}: expected 0 to 9, get the file again")
    return x[:, None], y.astype(np.int64)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or gzip: uint8 with that many dimensions.

    Layout: magic number 0, 0, 8 (unsigned byte), dimensions; then each size as a big-endian uint32;
    then the values. torchvision's own reader does not open .gz.

    Raises ValueError, naming the file, if it is anything else.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}): get it again") from error
    magic, header = bytes([0, 0, 8, dimensions]), 4 + 4 * dimensions
    if content[:4] != magic or len(content) < header:
        raise ValueError(
            f"{path} is not an IDX file of {dimensions}-dimensional bytes: it starts with "
            f"{content[:4].hex()!r}, expected {magic.hex()!r}; get it again"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - header} values, its header promises {math.prod(shape)} "
            f"(shape {shape}): it is truncated or damaged, get it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)

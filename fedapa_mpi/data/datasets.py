"""Data sets as arrays in memory. Everything here runs on rank 0 only; clients get shards.

A data set is one entry in `_LOADERS`; sets that live in files also have a `Source` (sources.py).
scikit-learn and torchvision take seconds to import, so they are imported where they are needed.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapa_mpi.data.sources import CIFAR10, CIFAR100, FASHION_MNIST, MNIST, Source, check, locate

# Run defaults that differ from the general ones, by data set.
DEFAULTS: dict[str, dict[str, object]] = {
    "digits": {"model": "mlp", "rounds": 60, "batch_size": 16, "lr": 0.05},
    "fmnist": {"model": "lenet5"},
    "mnist": {"model": "lenet5"},
    "cifar10": {"model": "lenet5"},
    "cifar100": {"model": "lenet5", "classes_per_client": 10},
    "groups": {"model": "mlp", "batch_size": 16, "lr": 0.05},
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


def names() -> tuple[str, ...]:
    """The built-in data sets."""
    return (*_LOADERS, "groups")


def partitioned() -> tuple[str, ...]:
    """Those that are one set of samples, to be spread over clients by a partition."""
    return tuple(_LOADERS)


def load(name: str, data_dir: str | None = None) -> Dataset:
    """Read a data set into memory. Only for rank 0: it may download, and it holds all samples.

    Files are looked for in `data_dir`, $FEDAPA_DATA, the distribution's folder and the cache, then
    downloaded through torchvision. The result does not depend on any seed.

    Raises ValueError for an unknown name or a damaged file, FileNotFoundError if there is no copy
    and no network.
    """
    if name not in _LOADERS:
        raise ValueError(f"unknown data set {name!r}: choose one of {', '.join(_LOADERS)}")
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


def _mnist(data_dir: str | None) -> Dataset:
    """MNIST: 60000 + 10000 images of 28x28 pixels (LeCun et al., Proc. IEEE 86, 1998)."""
    return _idx_dataset("mnist", MNIST, data_dir)


def _cifar10(data_dir: str | None) -> Dataset:
    """CIFAR-10: 50000 + 10000 colour images of 32x32 pixels (Krizhevsky 2009)."""
    return _cifar_dataset("cifar10", CIFAR10, 10, data_dir)


def _cifar100(data_dir: str | None) -> Dataset:
    """CIFAR-100: the same in 100 (fine) classes."""
    return _cifar_dataset("cifar100", CIFAR100, 100, data_dir)


_LOADERS: dict[str, Callable[[str | None], Dataset]] = {
    "digits": _digits,
    "fmnist": _fmnist,
    "mnist": _mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
}


# ---------------------------------------------------------------------------- CIFAR


def _cifar_dataset(name: str, source: Source, classes: int, data_dir: str | None) -> Dataset:
    """A set in torchvision's pickled batches; torchvision reads them and compares checksums."""
    import torchvision.datasets

    folder = locate(source, data_dir)[0].parent
    reader = getattr(torchvision.datasets, source.torchvision_class)
    here = type(source.torchvision_class, (reader,), {"base_folder": ""})  # wherever they lie
    try:
        train, test = here(str(folder), train=True), here(str(folder), train=False)
    except RuntimeError:
        for file, md5 in [*reader.train_list, *reader.test_list, _meta(reader)]:
            check(source, folder / file, (folder / file).read_bytes(), md5)
        raise
    return Dataset(
        name, *_arrays(train), *_arrays(test), classes, scale=255.0, mean=(0.5,), std=(0.5,)
    )


def _meta(reader: Any) -> tuple[str, str]:
    return reader.meta["filename"], reader.meta["md5"]


def _arrays(images: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images as uint8 [N, 3, 32, 32], which torchvision gives with colours last, and labels."""
    x = np.ascontiguousarray(images.data.transpose(0, 3, 1, 2))
    return x, np.array(images.targets, np.int64)


# ---------------------------------------------------------------------------- reading IDX files


def _idx_dataset(name: str, source: Source, data_dir: str | None) -> Dataset:
    """A set of 10 classes of grey images in four IDX files (MNIST's format)."""
    paths = locate(source, data_dir)
    contents = [_content(path) for path in paths]
    for path, content, md5 in zip(paths, contents, source.md5):
        check(source, path, content, md5)
    x_train, y_train = _idx_pair(paths[:2], contents[:2])
    x_test, y_test = _idx_pair(paths[2:], contents[2:])
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"{paths[2]} holds images of shape {x_test.shape[1:]}, {paths[0]} of "
            f"{x_train.shape[1:]}: the files belong to different data sets, get them again"
        )
    return Dataset(
        name, x_train, y_train, x_test, y_test, classes=10, scale=255.0, mean=(0.5,), std=(0.5,)
    )


def _idx_pair(paths: list[Path], contents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Images as uint8 [N, 1, H, W] and their labels as int64 [N]."""
    images, labels = paths
    x = parse_idx(images, contents[0], 3)
    y = parse_idx(labels, contents[1], 1)
    if len(x) != len(y):
        raise ValueError(
            f"{images} holds {len(x)} images, but {labels} {len(y)} labels: get both again"
        )
    if y.max(initial=0) > 9:
        raise ValueError(f"{labels} holds the label {y.max()}: expected 0 to 9, get the file again")
    return x[:, None], y.astype(np.int64)


def parse_idx(path: Path, content: bytes, dimensions: int) -> np.ndarray:
    """The unpacked content of an IDX file of unsigned bytes: uint8 with that many dimensions.

    Layout: magic number 0, 0, 8 (unsigned byte), dimensions; then each size as a big-endian uint32;
    then the values.

    Raises ValueError, naming the file, if it is anything else.
    """
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


def _content(path: Path) -> bytes:
    """What a file holds, unpacked; torchvision's own reader does not open .gz.

    Raises ValueError if it cannot be unpacked.
    """
    content = path.read_bytes()
    try:
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}): get it again") from error

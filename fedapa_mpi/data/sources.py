"""Where the files of a data set lie: the places searched, the download, the checksums.

torchvision takes seconds to import, so it is imported where it is needed.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

CACHE = Path(
    "~/.cache/fedapa-mpi"
)  # downloads go here when neither --data_dir nor FEDAPA_DATA is set
DOWNLOAD_TIMEOUT = 20.0  # seconds of silence; compute nodes often drop packets instead of refusing


@dataclass(frozen=True)
class Source:
    """Where the files of a data set may lie and where to get them."""

    title: str
    files: tuple[str, ...]
    folder: str  # where torchvision puts them below its root
    torchvision_class: str
    packed: bool = False  # whether we read .gz as well
    md5: tuple[str, ...] = ()  # of the unpacked files; where torchvision reads, it has its own
    system: Path | None = None  # the distribution's own copy
    package: str = ""  # what a user installs to have it

    def download(self, root: Path) -> None:
        """Fetch the files into root / folder. Raises OSError or RuntimeError if that fails."""
        import torchvision.datasets

        with _socket_timeout(DOWNLOAD_TIMEOUT):
            getattr(torchvision.datasets, self.torchvision_class)(str(root), download=True)


IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

FASHION_MNIST = Source(
    title="Fashion-MNIST",
    files=IDX_FILES,
    folder="FashionMNIST/raw",
    torchvision_class="FashionMNIST",
    packed=True,
    md5=(
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    system=Path("/usr/share/datasets/fashion-mnist"),
    package="Debian package dataset-fashion-mnist",
)

MNIST = Source(
    title="MNIST",
    files=IDX_FILES,
    folder="MNIST/raw",
    torchvision_class="MNIST",
    packed=True,
    md5=(
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
)

CIFAR10 = Source(
    title="CIFAR-10",
    files=(*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"),
    folder="cifar-10-batches-py",
    torchvision_class="CIFAR10",
)

CIFAR100 = Source(
    title="CIFAR-100",
    files=("train", "test", "meta"),
    folder="cifar-100-python",
    torchvision_class="CIFAR100",
)


def check(source: Source, path: Path, content: bytes, md5: str) -> None:
    """Refuse a file that is not the original one.

    Raises ValueError that names the file and both checksums.
    """
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(
            f"{path} has the MD5 checksum {found}, {source.title}'s is {md5}: it is damaged or "
            "belongs to another data set; remove it or get it again. (Data of your own: "
            "--dataset FILE.h5, see python -m fedapa_mpi.data --help)"
        )


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
        found = [_present(folder / file, source.packed) for file in source.files]
        if complete := [path for path in found if path]:
            missing = [file for file, path in zip(source.files, found) if not path]
            if not missing:
                return complete
            log.warning("%s: %s is incomplete: no %s", source.title, folder, ", ".join(missing))
    return None


def _present(path: Path, packed: bool) -> Path | None:
    # os.path.isfile, because Path.is_file raises in a folder that this user may not enter.
    candidates = [path, path.with_name(path.name + ".gz")] if packed else [path]
    return next((candidate for candidate in candidates if os.path.isfile(candidate)), None)


def _not_found(source: Source, places: list[Path], root: Path, reason: object) -> str:
    searched = ", ".join(f"{place} and {place / source.folder}" for place in places)
    reason = " ".join(str(reason).split())  # torchvision's message has several lines
    package = f"install the {source.package}, or " if source.package else ""
    return (
        f"{source.title}: no copy found in {searched}; the download into {root} failed "
        f"({reason}). To get it: {package}copy {', '.join(source.files)}"
        f"{' (plain or .gz)' if source.packed else ''} into a folder and name that with "
        "--data_dir or FEDAPA_DATA"
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

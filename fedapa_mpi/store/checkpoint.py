"""Checkpoints: all that a run needs to go on, one HDF5 file for each.

    /server/<name>            /clients/0007/<name>            /<extra>/<name>
    attributes: format, round, config (JSON), and what the run adds (versions, hashes, ...)

The first 512 bytes are an HDF5 user block with the seal: text that holds the sha256 of all other
bytes. `head -n 3 FILE` shows it and `tail -c +513 FILE | sha256sum` repeats it. A file whose seal
does not match is damaged and never used; `latest` then takes the one before. Written and read on
rank 0, one client at a time.
"""

import hashlib
import json
import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from fedapa_mpi.store.folder import SteadyFile, remove_leftovers, replacing
from fedapa_mpi.store.state import State

logger = logging.getLogger("fedapa_mpi")

Attribute = str | int | float

FORMAT = 1
SEAL_SIZE = 512  # bytes; the smallest user block that HDF5 allows
NAME = re.compile(r"round-(\d{6,})\.h5")
SEAL = re.compile(rb"fedapa-mpi checkpoint\nsha256 ([0-9a-f]{64})\nbytes (\d+)\n")
# numpy lacks these: stored as integers of the same bits, with the type's name as an attribute
BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class CheckpointError(OSError):
    """A checkpoint that cannot be written or read; `errno` is the system's, where it has one."""


def save(
    folder: Path,
    *,
    round: int,
    config: Mapping[str, Any],
    attributes: Mapping[str, Attribute],
    server: State,
    clients: Iterable[tuple[int, State]],
    extras: Mapping[str, State] | None = None,
) -> Path:
    """Write the checkpoint of `round` into `folder` and return its path.

    `clients` may be a generator of (id, state): one state is held at a time. `extras` are further
    groups of tensors beside server and clients. Returns when all is on the disk under the final
    name. Raises CheckpointError if the disk is full or fails; earlier checkpoints stay as they are.
    """
    header = {**attributes, "format": FORMAT, "round": round, "config": json.dumps(config)}
    path = folder / f"round-{round:06}.h5"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            with h5py.File(file, "w", userblock_size=SEAL_SIZE) as h5:
                h5.attrs.update(header)
                for name, state in _groups(server, clients, extras or {}):
                    _write_state(h5.create_group(name), state, file)
            _seal(file)
    except OSError as error:
        raise _not_written(path, error) from error
    return path


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` (at least 2) checkpoints, and what a killed save left.

    Files without a seal for their size do not count and stay; content is not read again here.
    """
    if keep < 2:
        raise ValueError(f"keep={keep}: at least 2, so that one is left if the newest is damaged")
    sealed = [path for path in _newest_first(folder) if _is_sealed(path)]
    for path in sealed[keep:]:
        path.unlink()
    remove_leftovers(folder, "round-*.h5")


def cut(folder: Path, round: int) -> None:
    """Remove the checkpoints of rounds after `round`, for a run that goes on from there.

    They are damaged, or `latest` had taken one; left there, they would count among those to keep.
    """
    for path in _newest_first(folder):
        if _round(path) > round:
            logger.warning("checkpoint %s removed: the run goes on from round %d", path, round)
            path.unlink()


def _groups(
    server: State, clients: Iterable[tuple[int, State]], extras: Mapping[str, State]
) -> Iterator[tuple[str, State]]:
    yield "server", server
    for client, state in clients:
        yield f"clients/{client:04}", state
    yield from extras.items()


def _write_state(group: h5py.Group, state: State, file: SteadyFile) -> None:
    for name, tensor in state.items():
        bits = tensor.detach().cpu().resolve_conj().resolve_neg()
        dataset = group.create_dataset(
            name, data=bits.view(BITS.get(bits.dtype, bits.dtype)).numpy()
        )
        if bits.dtype in BITS:
            dataset.attrs["dtype"] = str(bits.dtype).removeprefix("torch.")
        file.check()  # no use in asking for more clients when the disk is full


def _seal(file: SteadyFile) -> None:
    text = f"fedapa-mpi checkpoint\nsha256 {_digest(file.path)}\nbytes {file.seek(0, 2)}\n"
    file.seek(0)
    file.write(text.encode().ljust(SEAL_SIZE, b"\0"))


def _not_written(path: Path, error: OSError) -> CheckpointError:
    last = latest(path.parent)
    kept = f"{last.name} is complete and untouched" if last else "there is no earlier one"
    failure = CheckpointError(
        f"checkpoint {path} cannot be written: {error.strerror or error}; {kept}. "
        "Free some space (a lower --keep helps) or make the folder writable, then use --resume"
    )
    failure.errno = error.errno
    return failure


class Checkpoint:
    """An open checkpoint; a context manager. Tensors are read on demand, to the CPU.

    Attributes: `path`, `round`, `config` (as saved, through JSON), `attributes` (as saved).
    Raises CheckpointError if the file is no HDF5 file and ValueError if it has another format.
    Does not look at the seal: take the path from `latest`, or ask `damage` first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # no lock of HDF5's own: files are never changed in place, and not every disk has locks
            self._h5 = h5py.File(path, "r", locking=False)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        header = {key: _plain(value) for key, value in self._h5.attrs.items()}
        if header.get("format") != FORMAT:
            self._h5.close()
            raise ValueError(
                f"checkpoint {path} has format {header.get('format', 'unknown')}, this version of "
                f"fedapa-mpi reads format {FORMAT}: continue the run with the version that began it"
            )
        self.round: int = header.pop("round")
        self.config: dict[str, Any] = json.loads(header.pop("config"))
        self.attributes: dict[str, Attribute] = {k: header[k] for k in header if k != "format"}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._h5.close()

    def server(self) -> State:
        """Return the server's state, names in alphabetical order."""
        return self._state("server")

    def client_ids(self) -> list[int]:
        """Return the ids of the stored clients, ascending."""
        return sorted(int(name) for name in self._h5.get("clients", ()))

    def client(self, client: int) -> State:
        """Return one client's state. Raises ValueError if it is not stored."""
        return self._state(f"clients/{client:04}")

    def extra(self, name: str) -> State:
        """Return the state saved as `extras[name]`. Raises ValueError if it is not stored."""
        return self._state(name)

    def _state(self, group: str) -> State:
        if group not in self._h5:
            raise ValueError(
                f"checkpoint {self.path} has no {group}: it holds {', '.join(self._h5)} and "
                f"{len(self.client_ids())} clients"
            )
        state: State = {}

        def read(name: str, item: h5py.HLObject) -> None:
            if isinstance(item, h5py.Dataset):
                state[name] = _read_tensor(item)

        self._h5[group].visititems(read)
        return state


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, None if there is none.

    Reads each file it considers to the end. A damaged one is skipped with a warning in the log.
    """
    for path in _newest_first(folder):
        reason = damage(path)
        if not reason:
            return path
        logger.warning("checkpoint %s is damaged and not used: %s", path, reason)
    return None


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint file, "" if it is complete. Reads all of it."""
    try:
        if _sealed_digest(path) != _digest(path):
            return "its content does not match the sha256 in its seal"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def differences(
    stored: Mapping[str, Any], new: Mapping[str, Any], may_change: Container[str] = ()
) -> list[str]:
    """Return a line for each field that differs and is not in `may_change`, stored fields first.

    NaN equals NaN, and a tuple the list that JSON made of it.
    """
    lines = []
    for name in [*stored, *(name for name in new if name not in stored)]:
        if name in may_change:
            continue
        if name not in new:
            lines.append(f"{name}: stored {stored[name]!r}, not known now")
        elif name not in stored:
            lines.append(f"{name}: not stored, asked {new[name]!r}")
        elif not _same(stored[name], new[name]):
            lines.append(f"{name}: stored {stored[name]!r}, asked {new[name]!r}")
    return lines


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)


def _read_tensor(dataset: h5py.Dataset) -> torch.Tensor:
    tensor = torch.from_numpy(np.asarray(dataset[()]))
    dtype = dataset.attrs.get("dtype")
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _round(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _newest_first(folder: Path) -> list[Path]:
    paths = [path for path in folder.glob("round-*.h5") if NAME.fullmatch(path.name)]
    return sorted(paths, key=_round, reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(SEAL_SIZE)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed_digest(path: Path) -> str:
    """Return the sha256 in the seal. Raises CheckpointError without a seal for this size."""
    with path.open("rb") as file:
        seal, size = SEAL.match(file.read(SEAL_SIZE)), file.seek(0, 2)
    if seal is None:
        raise CheckpointError(f"it has no seal in its first {SEAL_SIZE} bytes")
    if int(seal[2]) != size:
        raise CheckpointError(f"it has {size} bytes, its seal says {int(seal[2])}")
    return seal[1].decode()


def _is_sealed(path: Path) -> bool:
    try:
        return bool(_sealed_digest(path))
    except OSError:
        return False

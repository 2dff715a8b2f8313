"""The folder of a run: what lies where, who uses it, how far it got, how a file is replaced.

Everything here happens on rank 0. No file of a run is ever changed in place: `replacing` writes a
new one beside it and renames, so that a crash or a full disk leaves the old file as it was.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

logger = logging.getLogger("fedapa_mpi")

STATUSES = ("running", "interrupted", "finished", "failed")
HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
NO_SUCH_CALL = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


class SteadyFile:
    """A new file that takes every write and remembers the first one that failed (`error`).

    HDF5 cannot give up on a file: after a failed write it keeps the file open, tries again with
    each close and once more when the process ends. So it gets to see success, and `check` raises
    what really happened. Has what `h5py.File` asks of a file object. Positions are in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file = FileIO(path, "w+")

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object, however many system calls that takes."""
        rest = memoryview(data).cast("B")
        with self._remembering():
            # a full disk first shows as a short write, which is no error yet
            while rest and self.error is None:
                rest = rest[self._file.write(rest) :]
        return len(data)

    def truncate(self, size: int) -> None:
        """Make the file `size` bytes long."""
        with self._remembering():
            self._file.truncate(size)

    def sync(self) -> None:
        """Return when everything is on the disk; raises the first OSError of this file's life."""
        with self._remembering():
            os.fsync(self._file.fileno())
        self.check()

    def check(self) -> None:
        """Raise the first OSError of this file's life, if there was one."""
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror, str(self.path))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position and return it."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the current position."""
        return self._file.tell()

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes from the current position on."""
        return self._file.read(size)

    def flush(self) -> None:
        """Do nothing: no byte waits in this process."""

    def close(self) -> None:
        """Close the file; some network file systems only now report a failed write."""
        with self._remembering():
            self._file.close()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[SteadyFile]:
    """Give an empty file to write; at the end of the block it becomes `path`, all at once.

    If anything goes wrong the new file is removed and `path` stays what it was. Raises the first
    OSError of a write, even where the block went on after it.
    """
    file = SteadyFile(path.with_name(f".{path.name}.{os.getpid()}.tmp"))
    try:
        try:
            yield file
            file.sync()
        finally:
            file.close()
            file.check()  # the cause, where HDF5 reported but a consequence
        os.replace(file.path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            file.path.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk: a rename lasts only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove new files that a killed process never renamed; `pattern` matches the final names.

    Only for who alone writes there: the temporary file of a living process would go too.
    """
    for leftover in folder.glob(f".{pattern}.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


class RunFolder:
    """The folder of one run, seen by one start of it (a job, a requeued job, a resumed one).

    Attributes: `path`; the files `results`, `status_file` and `lock_file` and the folder
    `checkpoints` in it; `started`, a name for this start that no other start shares.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.results = self.path / "results.h5"
        self.checkpoints = self.path / "checkpoints"
        self.status_file = self.path / "status.json"
        self.lock_file = self.path / "lock"
        start = f"{job_id() or 'local'}.{restart_count()}.{os.getpid()}"
        self.started = f"{start}.{datetime.now().isoformat(timespec='microseconds')}"
        self._lock: int | None = None

    def check_new(self) -> None:
        """Raise ValueError unless a new run can live here; creates nothing, not even the folder."""
        self._check_unused()
        self.check_writable()

    def check_writable(self) -> None:
        """Raise ValueError unless this folder can be made or written to; creates nothing."""
        try:
            self._check_writable()
        except OSError as error:
            raise self._unusable(error) from error

    def create(self) -> None:
        """Make the folder and its `checkpoints`, where missing. Raises ValueError if it cannot."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def lock(self) -> None:
        """Keep every other run off this folder until `unlock` or the end of this process.

        Raises ValueError if another run is using it. Where the file system has no locks, says so
        once and goes on. Holding the lock, removes what a killed process left half-written.
        """
        if self._lock is not None:
            return
        try:
            self._lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        if not self._take(self._lock):
            return
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        remove_leftovers(self.path, "*")

    def unlock(self) -> None:
        """Give the folder free. The file stays: removing it would race with the next owner."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_status(self, status: str, **facts: Any) -> None:
        """Replace status.json: what job scripts and people read to see how this start stands.

        `status` is running, interrupted, finished or failed; `facts` are `round`, `rounds` and
        `reason` (null where not given) and whatever else JSON can hold. Raises OSError.
        """
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}, expected one of {', '.join(STATUSES)}")
        content = {
            "status": status,
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "started": self.started,
            "job_id": job_id(),
            "restart_count": restart_count(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "round": None,
            "rounds": None,
            "reason": None,
            **facts,
        }
        text = json.dumps(content, indent=2) + "\n"  # a line per key: shell scripts grep it
        with replacing(self.status_file) as file:
            file.write(text.encode())

    def read_status(self) -> dict[str, Any] | None:
        """Return the status last written, None if there is none. Raises ValueError if damaged."""
        try:
            return json.loads(self.status_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.status_file} is not JSON ({error}): remove it") from error

    def _check_unused(self) -> None:
        parts = (self.results, self.checkpoints, self.status_file)
        found = [part.name for part in parts if os.path.lexists(part)]
        if found:
            raise ValueError(
                f"--out {self.path} already holds a run ({', '.join(found)}): continue it with "
                f"--resume {self.path}, use another --out, or let --out {self.path} --resume auto "
                "continue it if it is there and start it if not"
            )

    def _check_writable(self) -> None:
        nearest = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        try:
            # the attempt itself: permission bits say nothing to root or on a read-only mount
            with tempfile.TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            error.filename = str(nearest)  # not the random name inside it
            raise

    def _take(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_SUCH_CALL:
                logger.warning(
                    "%s: this file system has no locks (%s); make sure that only one run uses %s",
                    *(self.lock_file, error.strerror, self.path),
                )
                return False
            self.unlock()
            if error.errno in HELD_BY_ANOTHER:
                raise self._in_use() from None
            raise self._unusable(error) from error
        return True

    def _in_use(self) -> ValueError:
        owner = self.lock_file.read_text(errors="replace").strip() or "pid not known"
        return ValueError(
            f"another run ({owner}) is using {self.path}: wait until it ends, stop it, or use "
            "another --out"
        )

    def _unusable(self, error: OSError) -> ValueError:
        reason = error.strerror or str(error)
        return ValueError(
            f"--out {self.path} cannot be used: {reason} ({error.filename or self.path}); choose a "
            "folder that you may write to"
        )


def job_id() -> str | None:
    """Return the SLURM job this process belongs to ("123", in an array "120_7"), or None."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def restart_count() -> int:
    """Return how often SLURM has requeued this job; 0 outside SLURM."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)

"""The folder of a run: refused or taken, locked, its status, and files replaced as a whole."""

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path

import pytest

from fedapa_mpi.store import folder
from fedapa_mpi.store.folder import RunFolder, replacing

SLURM = ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT")


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    for name in SLURM:
        monkeypatch.delenv(f"SLURM_{name}", raising=False)


def everything(path):
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def child(code, *arguments):
    """Start Python on `code`; wait for its first line."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


# ------------------------------------------------------------------------------- a new folder


@pytest.mark.parametrize("name", ["run", "runs/new/run", "."])
def test_usable_and_nothing_created(tmp_path, name):
    RunFolder(tmp_path / name).check_new()
    assert everything(tmp_path) == []


def test_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder("runs/a")
    run.check_new()
    run.create()
    assert everything(tmp_path) == ["runs", "runs/a", "runs/a/checkpoints"]


@pytest.mark.parametrize("name", ["results.h5", "checkpoints", "status.json"])
def test_used_folder_is_refused_with_the_ways_out(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError) as caught:
        RunFolder(tmp_path).check_new()
    message = str(caught.value)
    assert name in message
    assert f"--resume {tmp_path}, use another --out" in message
    assert f"--out {tmp_path} --resume auto" in message


@pytest.mark.parametrize("name", ["file", "file/run", "file/a/b", "x" * 300])
def test_impossible_places_are_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"--out .* cannot be used: (Not a dir|File name too long)"
    ):
        RunFolder(tmp_path / name).check_new()
    assert everything(tmp_path) == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_place_that_root_cannot_write_either():
    with pytest.raises(ValueError, match=r"cannot be used: .*\(/proc\)"):
        RunFolder("/proc/run").check_new()


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not stop root")
def test_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        RunFolder(tmp_path / "run").check_new()


def test_read_only_mount(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        with pytest.raises(ValueError, match="Read-only file system"):
            RunFolder(tmp_path / "runs" / "run").check_new()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_create(tmp_path):
    run = RunFolder(tmp_path / "a" / "b")
    run.create()
    run.create()
    assert run.checkpoints.is_dir()
    assert run.results == tmp_path / "a" / "b" / "results.h5"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="Not a directory"):
        RunFolder(tmp_path / "file" / "run").create()


# ------------------------------------------------------------------------------------ the lock

HOLD = """
    import sys
    from fedapa_mpi.store.folder import RunFolder
    run = RunFolder(sys.argv[1])
    run.lock()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_lock_of_another_process_until_it_is_killed(tmp_path):
    other = child(HOLD, tmp_path)
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match=rf"another run \(pid {other.pid} on .*\) is using"):
        run.lock()
    other.send_signal(signal.SIGKILL)
    other.communicate()
    run.lock()
    assert run.lock_file.read_text().startswith(f"pid {os.getpid()} on ")
    run.unlock()


def test_lock_and_unlock_in_one_process(tmp_path):
    one, two = RunFolder(tmp_path), RunFolder(tmp_path)
    one.lock()
    one.lock()  # has it already
    with pytest.raises(ValueError, match=f"pid {os.getpid()}"):
        two.lock()
    one.unlock()
    two.lock()
    two.unlock()
    two.unlock()


def test_lock_removes_leftovers(tmp_path):
    for name in (".results.h5.17.tmp", ".status.json.17.tmp", "notes.tmp"):
        (tmp_path / name).touch()
    run = RunFolder(tmp_path)
    run.lock()
    run.unlock()
    assert everything(tmp_path) == ["lock", "notes.tmp"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_file_system_without_locks(tmp_path, monkeypatch, caplog, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = RunFolder(tmp_path)
    with caplog.at_level(logging.WARNING, "fedapa_mpi"):
        run.lock()
        run.lock()
    assert len(caplog.messages) == 1
    assert str(run.lock_file) in caplog.messages[0]
    assert "has no locks" in caplog.messages[0]
    run.unlock()


def test_lock_in_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        RunFolder(tmp_path / "missing").lock()


# ---------------------------------------------------------------------------------- the status


def test_status_outside_slurm(tmp_path):
    run = RunFolder(tmp_path)
    assert run.read_status() is None
    run.write_status("running", round=3, rounds=50)
    status = run.read_status()
    when = datetime.fromisoformat(status.pop("time"))
    assert abs((datetime.now().astimezone() - when).total_seconds()) < 60
    assert status.pop("host")
    assert status.pop("started") == run.started
    assert status == {
        "status": "running",
        "job_id": None,
        "restart_count": 0,
        "pid": os.getpid(),
        "round": 3,
        "rounds": 50,
        "reason": None,
    }
    lines = run.status_file.read_text().splitlines()
    assert '  "status": "running",' in lines  # a key per line, for grep
    assert everything(tmp_path) == ["status.json"]


def test_status_in_a_requeued_array_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    run = RunFolder(tmp_path)
    run.write_status("interrupted", reason="SIGUSR1")
    assert run.read_status()["job_id"] == "123"
    assert run.read_status()["reason"] == "SIGUSR1"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "120")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    run.write_status("interrupted")
    assert run.read_status()["job_id"] == "120_0"
    assert run.read_status()["restart_count"] == 2


def test_started_tells_starts_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    one = RunFolder(tmp_path)
    one.write_status("running")
    first = one.read_status()["started"]
    one.write_status("finished")
    assert one.read_status()["started"] == first
    assert first.startswith(f"123.0.{os.getpid()}.")
    assert RunFolder(tmp_path).started != first


def test_unknown_status_and_damaged_file(tmp_path):
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="'done', expected one of running, interrupted"):
        run.write_status("done")
    run.status_file.write_text('{"status": ')
    with pytest.raises(ValueError, match=r"status\.json is not JSON"):
        run.read_status()


# ----------------------------------------------------------------------------- replaced as a whole


def test_replacing_leaves_the_old_file_on_any_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted():
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path.read_text(), everything(tmp_path)) == ("old", ["file"])
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert (path.read_text(), everything(tmp_path)) == ("new", ["file"])


class Failing:
    """A disk that takes writes byte by byte and is full after three."""

    def __init__(self, file):
        self.file = file
        self.left = 3

    def write(self, data):
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1
        return self.file.write(data[:1])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_first_failure_counts_whatever_came_after(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def overfull():
        with replacing(path) as file:
            file._file = Failing(file._file)
            file.write(b"abc")  # three short writes, and all is there
            file.check()
            assert file.write(b"de") == 2  # HDF5 must not notice
            raise RuntimeError("HDF5 stumbles over what is missing")

    with pytest.raises(OSError, match="No space left") as caught:
        overfull()
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value.__context__, RuntimeError)
    assert (path.read_text(), everything(tmp_path)) == ("old", ["file"])


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "file") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_folders_that_cannot_be_synced_are_no_error(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(_):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    folder.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        folder.sync_folder(tmp_path)


WRITE = """
    import sys, time
    from fedapa_mpi.store.folder import RunFolder
    run = RunFolder(sys.argv[1])
    run.write_status("running", round=0)
    print("ready", flush=True)
    for round in range(1, 10**9):
        run.write_status("running", round=round, reason="x" * 5000)
"""


def test_status_is_never_seen_half_written(tmp_path):
    writer = child(WRITE, tmp_path)
    run = RunFolder(tmp_path)
    seen, limit = set(), time.monotonic() + 30
    while len(seen) < 20 and time.monotonic() < limit:
        seen.add(run.read_status()["round"])
    writer.kill()
    writer.communicate()
    assert len(seen) == 20
    assert json.loads(run.status_file.read_text())["status"] == "running"

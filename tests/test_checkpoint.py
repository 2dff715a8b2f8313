"""Checkpoints: exact, complete or not there, and what happens when a disk or a process fails."""

import errno
import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import weakref

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapa_mpi.store import checkpoint
from fedapa_mpi.store.checkpoint import Checkpoint, CheckpointError, damage, differences, latest

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def save(folder, round=1, server=None, clients=(), **more):
    state = {"A": torch.full((3, 3), float(round))} if server is None else server
    more = {"config": {"eta": 0.01}, "attributes": {}, **more}
    return checkpoint.save(folder, round=round, server=state, clients=clients, **more)


def random_bits(dtype, shape):
    """Any bit pattern a type can hold, NaN payloads included; bool only has two."""
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * size
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_comes_back_bit_for_bit(tmp_path, dtype):
    shapes = {"matrix": (3, 5), "optimizer/0.step": (), "model/none": (0, 4), "model/head.w": (7,)}
    state = {name: random_bits(dtype, shape) for name, shape in shapes.items()}
    with Checkpoint(save(tmp_path, server=state)) as stored:
        back = stored.server()
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == dtype
        assert back[name].shape == tensor.shape
        assert bits(back[name]) == bits(tensor)


def test_views_and_conjugates_are_stored_by_value(tmp_path):
    z = torch.tensor([[1 + 2j, 3 - 1j]])
    state = {"t": torch.arange(6.0, requires_grad=True).reshape(2, 3).T, "z": z.conj()}
    with Checkpoint(save(tmp_path, server=state)) as stored:
        back = stored.server()
    assert back["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["z"].tolist() == [[1 - 2j, 3 + 1j]]


def test_layout_is_plain_hdf5(tmp_path):
    path = save(
        tmp_path / "new" / "checkpoints",
        round=40,
        server={"A": torch.eye(2), "theta/0": torch.zeros(3)},
        clients=[(7, {"model/head.weight": torch.ones(2)}), (12345, {})],
        attributes={"versions": "torch 2", "horizon": 50},
        extras={"scores": {"recv": torch.ones(2, 3)}},
    )
    assert path.name == "round-000040.h5"
    with h5py.File(path, "r") as h5:
        assert h5["server/A"][:].tolist() == [[1, 0], [0, 1]]
        assert h5["clients/0007/model/head.weight"][:].tolist() == [1, 1]
        assert list(h5["clients"]) == ["0007", "12345"]
        assert h5["scores/recv"].shape == (2, 3)
        assert json.loads(h5.attrs["config"]) == {"eta": 0.01}
        assert (h5.attrs["format"], h5.attrs["round"], h5.attrs["horizon"]) == (1, 40, 50)
        assert h5.attrs["versions"] == "torch 2"


def test_reads_back_what_was_given(tmp_path):
    attributes = {"versions": "torch 2", "horizon": 50, "threads": 1, "share": 0.5}
    clients = [(i, {"n": torch.tensor(i)}) for i in (0, 2, 10)]
    path = save(
        tmp_path,
        round=3,
        config={"eta": float("nan"), "sizes": (1, 2)},
        attributes=attributes,
        clients=clients,
        extras={"scores": {"recv": torch.ones(3)}},
    )
    with Checkpoint(path) as stored:
        assert stored.round == 3
        assert stored.attributes == attributes
        assert not differences(stored.config, {"eta": float("nan"), "sizes": (1, 2)})
        assert stored.client_ids() == [0, 2, 10]
        assert [stored.client(i)["n"].item() for i in stored.client_ids()] == [0, 2, 10]
        assert stored.extra("scores")["recv"].tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match=r"has no clients/0001: .* 3 clients"):
            stored.client(1)
        with pytest.raises(ValueError, match="has no rng"):
            stored.extra("rng")


def test_clients_are_asked_for_one_by_one(tmp_path):
    alive = []

    def clients():
        for i in range(4):
            tensor = torch.zeros(10)
            alive.append(weakref.ref(tensor))
            yield i, {"w": tensor}
            del tensor
            assert sum(tensor() is not None for tensor in alive) <= 1

    with Checkpoint(save(tmp_path, clients=clients())) as stored:
        assert stored.client_ids() == [0, 1, 2, 3]
    assert len(alive) == 4


def test_seal_says_the_sha256_of_all_the_rest(tmp_path):
    content = save(tmp_path).read_bytes()
    lines = content[:512].rstrip(b"\0").decode().splitlines()
    assert lines[0] == "fedapa-mpi checkpoint"
    assert lines[1] == f"sha256 {hashlib.sha256(content[512:]).hexdigest()}"
    assert lines[2] == f"bytes {len(content)}"


def test_newest_complete_one_is_the_latest(tmp_path):
    assert latest(tmp_path / "missing") is None
    for round in (9, 1000000, 10):
        path = save(tmp_path, round)
        assert damage(path) == ""
    (tmp_path / "round-9999999.h5.old").write_bytes(b"not one of ours")
    (tmp_path / "round-x.h5").write_bytes(b"not one of ours")
    assert latest(tmp_path).name == "round-1000000.h5"


def cut_by_one(content, _):
    return content[:-1]


def add_one(content, _):
    return content + b"\0"


def flip(content, place):
    at = {"magic": 3, "digest": 40, "first": 512, "middle": len(content) // 2, "last": -1}[place]
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("harm", "place", "reason"),
    [
        (cut_by_one, None, "its seal says"),
        (add_one, None, "its seal says"),
        (lambda content, _: content[:100], None, "seal"),
        (lambda content, _: b"", None, "no seal"),
        (flip, "magic", "no seal"),
        (flip, "digest", "sha256"),
        (flip, "first", "does not match"),
        (flip, "middle", "does not match"),
        (flip, "last", "does not match"),
    ],
)
def test_damaged_newest_is_skipped_and_named(tmp_path, caplog, harm, place, reason):
    before, newest = save(tmp_path, 1), save(tmp_path, 2)
    newest.write_bytes(harm(newest.read_bytes(), place))
    with caplog.at_level(logging.WARNING, "fedapa_mpi"):
        assert latest(tmp_path) == before
    assert len(caplog.messages) == 1
    assert str(newest) in caplog.messages[0]
    assert reason in caplog.messages[0]


def test_not_readable_counts_as_damaged(tmp_path):
    (tmp_path / "round-000002.h5").mkdir()
    assert damage(tmp_path / "round-000002.h5") == "Is a directory"
    assert damage(tmp_path / "round-000003.h5") == "No such file or directory"


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for round in range(1, 6):
        save(tmp_path, round)
    damaged = tmp_path / "round-000005.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    leftover = tmp_path / ".round-000003.h5.77.tmp"
    leftover.touch()
    checkpoint.prune(tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["round-000003.h5", "round-000004.h5", "round-000005.h5"]
    with pytest.raises(ValueError, match="keep=1"):
        checkpoint.prune(tmp_path, keep=1)


def test_cut_removes_later_rounds(tmp_path, caplog):
    for round in (1, 2, 3):
        save(tmp_path, round)
    with caplog.at_level(logging.WARNING, "fedapa_mpi"):
        checkpoint.cut(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-000001.h5",
        "round-000002.h5",
    ]
    assert "round-000003.h5" in caplog.text


def test_a_failing_client_leaves_nothing(tmp_path):
    save(tmp_path, 1)

    def clients():
        yield 0, {"w": torch.zeros(3)}
        raise RuntimeError("client 1 is gone")

    with pytest.raises(RuntimeError, match="client 1 is gone"):
        save(tmp_path, 2, clients=clients())
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001.h5"]
    assert save(tmp_path, 2) == latest(tmp_path)


def test_other_format_and_other_files_are_refused(tmp_path):
    path = save(tmp_path)
    with h5py.File(path, "r+") as h5:
        h5.attrs["format"] = 7
    with pytest.raises(ValueError, match="has format 7, this version of fedapa-mpi reads format 1"):
        Checkpoint(path)
    path.write_bytes(b"no HDF5")
    with pytest.raises(CheckpointError, match=r"round-000001\.h5 cannot be read"):
        Checkpoint(path)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from fedapa_mpi.store import checkpoint, folder

    target = Path(sys.argv[1])
    def save(round):
        checkpoint.save(target, round=round, config={}, attributes={},
                        server={"A": torch.eye(3)}, clients=[])
    save(1)
    os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
    save(2)
"""


def python(code, *arguments, **options):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_killed_between_write_and_rename(tmp_path):
    assert python(KILLED, tmp_path).returncode == -signal.SIGKILL
    leftover = [path for path in tmp_path.iterdir() if path.name.startswith(".round-000002.h5.")]
    assert len(leftover) == 1  # the whole file was there, but for its name
    assert latest(tmp_path).name == "round-000001.h5"
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000001.h5"]


def check_full_disk(folder, size, free):
    """Write 16 MB where at most 2 fit, then go on in the same process; returns the error."""
    small = {"A": torch.zeros(10)}
    first = save(folder, 1, small)
    asked, count = [], (16 << 20) // size

    def clients():
        for i in range(count):
            asked.append(i)
            yield i, {f"part/{k}": torch.zeros(size // 40, dtype=torch.float64) for k in range(5)}

    with pytest.raises(CheckpointError) as caught:
        save(folder, 2, small, clients())
    assert [path.name for path in folder.iterdir()] == [first.name]
    assert damage(first) == ""
    assert len(asked) < count / 4  # it stopped there and then
    free()
    assert latest(folder) == first
    assert damage(save(folder, 2, small, [(0, {"w": torch.ones(5)})])) == ""
    return caught.value


@pytest.fixture
def tiny_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("size", [400, 40_000, 1_000_000])
def test_full_disk(tiny_disk, size):
    error = check_full_disk(tiny_disk, size, free=lambda: None)
    assert error.errno == errno.ENOSPC
    assert "round-000002.h5 cannot be written: No space left on device" in str(error)
    assert "round-000001.h5 is complete and untouched" in str(error)
    assert "Free some space" in str(error)


def test_file_size_limit_acts_like_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        error = check_full_disk(tmp_path, 40_000, lift)
    finally:
        lift()
    assert error.errno == errno.EFBIG
    assert "File too large" in str(error)


FULL = """
    import resource, sys
    from pathlib import Path
    import torch
    from fedapa_mpi.store import checkpoint

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        checkpoint.save(Path(sys.argv[1]), round=1, config={}, attributes={},
                        server={"A": torch.zeros(1 << 20)}, clients=[])
    except checkpoint.CheckpointError as error:
        print(error)
"""


def test_after_a_full_disk_a_process_ends_in_silence(tmp_path):
    done = python(FULL, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "there is no earlier one" in done.stdout


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(tmp_path / "file" / "checkpoints")


def test_differences_by_hand():
    stored = {"eta": 0.01, "rounds": 50, "nan": float("nan"), "sizes": [1, 2], "gone": "x"}
    new = {"rounds": 60, "eta": 0.1, "nan": float("nan"), "sizes": (1, 2), "fresh": True}
    assert differences(stored, new, may_change={"rounds"}) == [
        "eta: stored 0.01, asked 0.1",
        "gone: stored 'x', not known now",
        "fresh: not stored, asked True",
    ]
    assert differences({"x": float("nan")}, {"x": 0.0}) == ["x: stored nan, asked 0.0"]
    assert differences({"x": [1, 2]}, {"x": [1, 3]}) == ["x: stored [1, 2], asked [1, 3]"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=4,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_nothing_differs_after_json(config):
    assert differences(json.loads(json.dumps(config)), config) == []


@given(st.dictionaries(st.text(min_size=1), st.integers(), min_size=1, max_size=4), st.data())
def test_one_changed_field_is_the_one_named(config, data):
    name = data.draw(st.sampled_from(sorted(config)))
    changed = {**config, name: config[name] + 1}
    assert differences(config, changed) == [
        f"{name}: stored {config[name]!r}, asked {config[name] + 1!r}"
    ]
    assert differences(config, changed, {name}) == []


def test_same_state_same_bytes(tmp_path):
    one, two = save(tmp_path / "a"), save(tmp_path / "b")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_tensors_come_back_on_the_cpu(tmp_path):
    with Checkpoint(save(tmp_path, server={"w": torch.arange(3.0, device="cuda")})) as stored:
        back = stored.server()["w"]
    assert back.device.type == "cpu"
    assert back.tolist() == [0, 1, 2]


def test_tensors_read_are_ones_own(tmp_path):
    path = save(tmp_path, server={"w": torch.zeros(2)})
    with Checkpoint(path) as stored:
        stored.server()["w"].add_(1)  # writable, and no view of the file
        assert np.array_equal(stored.server()["w"].numpy(), [0, 0])
    assert os.path.exists(path)

"""results.h5 as others read it, its growth and its cuts, the metrics, and the fingerprint."""

import errno
import json
import resource
import struct

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapa_mpi.store.fingerprint import Fingerprint, comparable, fingerprint
from fedapa_mpi.store.results import SECONDS, Results, RoundRecord, accuracy_metrics, score_arrays

M, C = 3, 2
NAN = float("nan")


def create(folder, **attributes):
    return Results.create(
        folder / "results.h5",
        attributes={"config": {"eta": 0.01}, "partition_hash": "abc", **attributes},
        labels=np.arange(M * C).reshape(M, C),
        test_samples=np.array([4, 2, 0]),
    )


def record(round, ranks=2, **changes):
    everyone = np.ones(M, bool)
    row = {
        "sampled": np.array([True, False, True]),
        "answered": np.array([True, False, False]),
        "loss": np.array([0.5, NAN, NAN]) + round,
        "rank": np.array([1, -1, 2]),
        "pid": np.array([100, -1, 101]),
        "device": np.array([-1, -1, 0]),
        "bytes_down": everyone * 40 * round,
        "bytes_up": everyone * 44,
        "seconds": {name: np.arange(ranks) + k for k, name in enumerate(SECONDS)},
        "recv": np.array([[3.0, 4, 8], [1, 2, 1], [0, 0, 0]]),
        "A": np.full((M, M), 1 / 3) * round,
    }
    return RoundRecord(round, **{**row, **changes})


def fill(results, rounds, **changes):
    for round in rounds:
        results.append(record(round, **changes))
    results.flush()
    return results


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name], err_msg=name)
        assert values.dtype == two[name].dtype, name


# ------------------------------------------------------------------------------------- the file


def test_new_file_has_every_dataset_without_rows(tmp_path):
    path = create(tmp_path, strategy="fedapa").path
    with h5py.File(path, "r") as h5:
        for name in ("round", "accuracy/post/worst10", "accuracy/recv/sampled/macro"):
            assert h5[name].shape == (0,), name
        for name in ("loss", "accuracy/post/client", "trained_by/pid", "bytes/up"):
            assert h5[name].shape == (0, M), name
        assert h5["labels"][:].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert h5["test_samples"][:].tolist() == [4, 2, 0]
        assert json.loads(h5.attrs["config"]) == {"eta": 0.01}
        expected = {"format": 1, "fingerprint": "", "status": "running", "strategy": "fedapa"}
        assert expected == {name: h5.attrs[name] for name in expected}


def test_rows_in_the_file_by_hand(tmp_path):
    path = fill(create(tmp_path), (1, 2)).path
    with h5py.File(path, "r") as h5:
        assert h5["round"][:].tolist() == [1, 2]
        assert h5["sampled"][:].tolist() == [[True, False, True]] * 2
        assert h5["answered"].dtype == np.bool_
        assert h5["accuracy/recv/client"][1].tolist()[:2] == [0.75, 0.5]
        assert np.isnan(h5["accuracy/recv/client"][1, 2])
        assert h5["test_loss/recv/client"][0].tolist()[:2] == [2, 0.5]
        assert h5["accuracy/recv/micro"][0] == pytest.approx(4 / 6)
        assert h5["accuracy/recv/macro"][0] == 0.625
        assert h5["accuracy/recv/sampled/micro"][0] == 0.75
        assert np.isnan(h5["accuracy/post/client"][:]).all()
        assert np.isnan(h5["accuracy/post/macro"][:]).all()
        assert h5["loss"][:, 0].tolist() == [1.5, 2.5]
        assert h5["trained_by/device"][0].tolist() == [-1, -1, 0]
        assert h5["bytes/down"][:, 1].tolist() == [40, 80]
        assert h5["bytes/up"].dtype == np.int64
        assert h5["seconds/wait"][0].tolist() == [1, 2]
        assert h5["A"].dtype == np.float32
        assert h5["A"].shape == (2, M, M)


def test_rows_join_file_and_memory(tmp_path):
    results = fill(create(tmp_path), (1, 2))
    whole = fill(create(tmp_path / "..", status="x"), (1, 2, 3)).rows()
    results.append(record(3))
    assert_same(results.rows(), whole)
    results.flush()
    assert_same(results.rows(), whole)
    assert_same(Results.open(results.path).rows(), whole)


def test_nothing_is_written_before_flush_nor_without_news(tmp_path):
    results = create(tmp_path)
    before = results.path.stat()
    results.append(record(1))
    results.set(status="finished")
    assert results.path.stat() == before
    results.flush()
    after = results.path.stat()
    assert after.st_ino != before.st_ino  # a copy took its place
    results.flush()
    assert results.path.stat() == after
    with h5py.File(results.path, "r") as h5:
        assert h5.attrs["status"] == "finished"
        assert h5.attrs["partition_hash"] == "abc"


def test_a_reader_keeps_the_file_it_opened(tmp_path):
    results = fill(create(tmp_path), [1])
    with h5py.File(results.path, "r") as h5:
        fill(results, [2])
        assert h5["round"][:].tolist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["results.h5"]


def test_thinned_A_has_its_own_rounds(tmp_path):
    results = create(tmp_path)
    for round in range(1, 6):
        results.append(record(round) if round % 2 else record(round, A=None))
    assert results.rows()["A_round"].tolist() == [1, 3, 5]
    results.flush()
    results.cut(4)
    rows = results.rows()
    assert rows["round"].tolist() == [1, 2, 3, 4]
    assert rows["A_round"].tolist() == [1, 3]
    assert rows["A"][:, 0, 0].tolist() == [np.float32(1 / 3), 1]


def test_strategy_without_A_has_no_A(tmp_path):
    assert "A" not in fill(create(tmp_path), [1], A=None).rows()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_other_number_of_ranks_after_resume(tmp_path, before, after):
    results = fill(create(tmp_path), [1], ranks=before)
    results.append(record(2, ranks=after))
    waiting = results.rows()
    results.flush()
    assert_same(results.rows(), waiting)
    seconds = waiting["seconds/compute"]
    assert seconds.shape == (2, 4)
    assert seconds[0, :before].tolist() == list(range(before))
    assert seconds[1, :after].tolist() == list(range(after))
    assert np.isnan(seconds).sum() == abs(before - after)


def test_cut_then_continue_equals_uninterrupted(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole = fill(create(tmp_path / "one"), range(1, 7))
    parts = fill(create(tmp_path / "two"), range(1, 6))
    resumed = Results.open(parts.path)
    resumed.cut(2)
    assert Results.open(parts.path).rows()["round"].tolist() == [1, 2]
    fill(resumed, range(3, 7))
    assert_same(resumed.rows(), whole.rows())


def test_cut_limits(tmp_path):
    results = fill(create(tmp_path), (1, 2))
    results.append(record(3))
    inode = results.path.stat().st_ino
    results.cut(2)
    assert results.path.stat().st_ino == inode  # nothing to drop: not copied
    assert results.rows()["round"].tolist() == [1, 2]  # the waiting row is gone
    with pytest.raises(ValueError, match=r"ends at round 2, .* after round 3"):
        results.cut(3)
    results.cut(0)
    assert results.rows()["A"].shape == (0, M, M)
    assert fill(results, [1]).rows()["round"].tolist() == [1]


def test_what_is_measured_at_the_end_is_dropped_when_the_run_goes_on(tmp_path):
    results = fill(create(tmp_path), (1, 2))
    scores = np.array([[3, 4, 1.0], [1, 4, 6.0], [np.nan] * 3])
    results.put(score_arrays("final/recv", scores))
    results.flush()
    with h5py.File(results.path) as h5:
        assert h5["final/recv/macro"][()] == 0.5
        np.testing.assert_array_equal(h5["final/recv/client"], [0.75, 0.25, np.nan])
        np.testing.assert_array_equal(h5["final/recv/test_loss"], [0.25, 1.5, np.nan])
    assert "final/recv/client" not in results.rows()
    Results.open(results.path).cut(2)
    with h5py.File(results.path) as h5:
        assert "final" not in h5


def test_rounds_without_gap(tmp_path):
    results = create(tmp_path)
    with pytest.raises(ValueError, match="of round 2: round 1 is due"):
        results.append(record(2))
    fill(results, (1, 2))
    for wrong in (2, 4):
        with pytest.raises(ValueError, match=f"of round {wrong}: round 3 is due"):
            results.append(record(wrong))


@pytest.mark.parametrize("field", ["loss", "bytes_up", "recv", "A"])
def test_wrong_shape_is_named(tmp_path, field):
    with pytest.raises(ValueError, match=f"{field} has shape"):
        create(tmp_path).append(record(1, **{field: np.zeros((M + 1, 3))}))


def test_not_ours(tmp_path):
    path = tmp_path / "results.h5"
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match=r"results\.h5 cannot be read"):
        Results.open(path)
    with h5py.File(path, "w"):
        pass
    with pytest.raises(ValueError, match="has format None"):
        Results.open(path)


def test_full_disk_keeps_file_and_rows(tmp_path):
    results = fill(create(tmp_path), [1])
    stored = results.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for round in range(2, 71):  # more than a chunk
        results.append(record(round))
    for limit in (len(stored) // 2, len(stored) + 100):  # too little for the copy, for the rows
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(
                OSError, match="File too large; it still ends with round 1"
            ) as caught:
                results.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert results.path.read_bytes() == stored
        assert [path.name for path in tmp_path.iterdir()] == ["results.h5"]
    results.flush()
    assert results.rows()["round"].tolist() == list(range(1, 71))


# ---------------------------------------------------------------------------------- the metrics


def test_metrics_by_hand():
    scores = np.array([[8.0, 10, 0], [1, 2, 0], [0, 0, 0], [NAN, NAN, NAN], [4, 4, 0]])
    metrics = accuracy_metrics(scores, np.array([True, False, True, True, True]))
    assert metrics == pytest.approx(
        {
            "micro": 13 / 16,
            "macro": (0.8 + 0.5 + 1) / 3,
            "std": np.sqrt((0.8**2 + 0.5**2 + 1) / 3 - (2.3 / 3) ** 2),
            "worst10": 0.5,
            "worst": 0.5,
            "sampled/micro": 12 / 14,
            "sampled/macro": 0.9,
        }
    )


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_worst_tenth_rounds_up(clients, worst):
    correct = np.random.default_rng(0).permutation(clients).astype(float)
    scores = np.stack([correct, np.full(clients, 100.0), correct], axis=1)
    metrics = accuracy_metrics(scores, np.zeros(clients, bool))
    assert metrics["worst10"] == pytest.approx((worst - 1) / 2 / 100)
    assert metrics["worst"] == 0
    assert np.isnan(metrics["sampled/micro"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scores", [np.zeros((0, 3)), np.zeros((2, 3)), np.full((2, 3), NAN)])
def test_no_tested_client_gives_nan_in_silence(scores, tmp_path):
    metrics = accuracy_metrics(scores, np.ones(len(scores), bool))
    assert len(metrics) == 7
    assert all(np.isnan(value) for value in metrics.values())


@pytest.mark.filterwarnings("error")
def test_rows_without_test_samples_make_no_noise(tmp_path):
    fill(create(tmp_path), [1], recv=np.zeros((M, 3)), post=np.full((M, 3), NAN))


# ------------------------------------------------------------------------------ the fingerprint

SERVER = {"A": torch.eye(2), "theta": torch.arange(6.0).reshape(2, 3)}
CLIENTS = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}]
METRICS = {"loss": np.array([[0.5, NAN]]), "round": np.array([1])}
REFERENCE = fingerprint(SERVER, CLIENTS, METRICS)


def test_fingerprint_does_not_see_order_of_names_nor_memory():
    server = {"theta": torch.arange(6.0).reshape(2, 3).T.contiguous().T, "A": torch.eye(2)}
    assert fingerprint(server, iter(CLIENTS), dict(reversed(METRICS.items()))) == REFERENCE


@pytest.mark.parametrize(
    "server",
    [
        {**SERVER, "A": torch.eye(2, dtype=torch.float64)},
        {**SERVER, "A": torch.eye(2).view(torch.int32)},  # same bytes
        {**SERVER, "theta": SERVER["theta"].reshape(3, 2)},  # same bytes
        {"A": SERVER["A"], "theta2": SERVER["theta"]},
        {"A": SERVER["A"]},
        {**SERVER, "A": torch.eye(2) * (1 + 2**-23)},
        {**SERVER, "none": torch.zeros(0)},
    ],
)
def test_fingerprint_sees_type_shape_name_and_bits(server):
    assert fingerprint(server, CLIENTS, METRICS) != REFERENCE


def test_fingerprint_sees_the_order_of_clients():
    assert fingerprint(SERVER, CLIENTS[::-1], METRICS) != REFERENCE
    moved = fingerprint({**SERVER, **CLIENTS[0]}, [{}, CLIENTS[1]], METRICS)
    assert moved != REFERENCE
    other_ids = Fingerprint().server(SERVER).client(0, CLIENTS[0]).client(2, CLIENTS[1])
    assert other_ids.metrics(METRICS).hexdigest() != REFERENCE


def test_fingerprint_step_by_step():
    steps = Fingerprint().server(SERVER).client(0, CLIENTS[0]).client(1, CLIENTS[1])
    assert steps.hexdigest() != REFERENCE
    assert steps.metrics(METRICS).hexdigest() == REFERENCE


def test_fingerprint_order_is_enforced():
    begun = Fingerprint().server(SERVER).client(3, CLIENTS[0])
    for late in (3, 2):
        with pytest.raises(ValueError, match="ascending"):
            begun.client(late, CLIENTS[1])
    with pytest.raises(ValueError, match="ascending"):
        begun.server(SERVER)
    with pytest.raises(ValueError, match="ascending"):
        begun.metrics(METRICS).client(4, CLIENTS[0])


def test_metrics_count_as_float64_with_one_nan():
    odd = np.frombuffer(struct.pack("<Q", 0xFFF8000000000123), np.float64)
    assert np.isnan(odd[0])
    metrics = {"loss": np.array([[0.5, odd[0]]], np.float64), "round": np.array([1.0], np.float32)}
    assert metrics["loss"].tobytes() != METRICS["loss"].tobytes()
    assert fingerprint(SERVER, CLIENTS, metrics) == REFERENCE
    assert fingerprint(SERVER, CLIENTS, {**METRICS, "round": np.array([2])}) != REFERENCE
    assert np.isnan(odd[0])  # the caller's arrays stay
    assert odd.tobytes()[0] == 0x23


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=2), elements=st.floats()), st.data())
def test_any_changed_number_changes_the_fingerprint(values, data):
    at = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
    changed = values.copy()
    changed[at] = 0.25 if values[at] != 0.25 else 0.5
    digests = [Fingerprint().metrics({"x": array}).hexdigest() for array in (values, changed)]
    assert digests[0] != digests[1]


def test_fingerprint_takes_every_type():
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int64, torch.uint16):
        for tensor in (torch.zeros((), dtype=dtype), torch.zeros((0, 2), dtype=dtype)):
            other = tensor.reshape(1, *tensor.shape)
            digests = {Fingerprint().server({"x": t}).hexdigest() for t in (tensor, other)}
            assert len(digests) == 2


def test_comparable_leaves_out_layout_and_time(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = fill(create(tmp_path / "one"), (1, 2)).rows()
    none = np.full(M, -1)
    two = fill(create(tmp_path / "two"), (1, 2), ranks=5, rank=none, pid=none, device=none, A=None)
    assert_same(comparable(one), comparable(two.rows()))
    assert sorted(comparable(one)) == [
        *("accuracy/post/client", "accuracy/recv/client", "answered", "bytes/down", "bytes/up"),
        *("loss", "round", "sampled", "test_loss/post/client", "test_loss/recv/client"),
    ]

"""Federations as files: what is read, what is refused, and runs that start from one."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from launching import Launcher

from fedapa_mpi import cli, start
from fedapa_mpi.config import RunConfig, experiment, meaningless
from fedapa_mpi.data import fedfile
from fedapa_mpi.data.__main__ import main
from fedapa_mpi.data.federation import data_hash
from fedapa_mpi.data.prepare import prepare

SIZES = [(12, 5), (0, 4), (7, 0)]  # training and test samples of three clients


def write(
    path: Path,
    sizes=SIZES,
    shape: tuple[int, ...] = (4,),
    dtype: str = "float32",
    classes: int = 3,
    **attributes,
) -> Path:
    """A federation as a user would write it, with nothing but what is asked for."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as h5:
        h5.attrs.update({"format": 1, "classes": classes, "input_shape": shape} | attributes)
        for i, both in enumerate(sizes):
            for split, n in zip(("train", "test"), both):
                y = rng.integers(classes, size=n)
                x = rng.normal(scale=0.5, size=(n, *shape)) + y.reshape(-1, *[1] * len(shape))
                h5[f"clients/{i:04d}/{split}/x"] = (x if dtype != "uint8" else 9 * x + 60).astype(
                    dtype
                )
                h5[f"clients/{i:04d}/{split}/y"] = y.astype("uint8")
    return path


def from_file(path: Path, **changes):
    return prepare(RunConfig(**{"dataset": str(path), "clients": 3} | changes))


# ---------------------------------------------------------------------------- reading


def test_what_a_user_wrote_is_what_clients_get(tmp_path):
    path = write(tmp_path / "own.h5")
    federation = from_file(path)
    assert (federation.classes, federation.input_shape) == (3, (4,))
    assert federation.sizes == [12, 0, 7]
    assert federation.test_samples.tolist() == [5, 4, 0]
    assert federation.labels.shape == (3, 3)
    assert (federation.truth, federation.groups, federation.partition_hash) == (None, None, "")
    first, empty, last = federation.shards
    with h5py.File(path) as h5:
        assert np.array_equal(first.x.numpy(), h5["clients/0000/train/x"][:])
        assert last.y.tolist() == h5["clients/0002/train/y"][:].tolist()
    assert np.array_equal(first.on("cpu").x.numpy(), first.x.numpy())  # nothing to normalise by
    assert (empty.n, empty.n_test, empty.input_shape) == (0, 4, (4,))
    assert federation.data_hash == data_hash(federation.shards)
    assert [s.n for s in federation.shards[1:]] == [0, 7]
    with pytest.raises(IndexError):
        federation.shards[3]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"scale": 255, "mean": 0.5, "std": 0.25}, lambda x: (x / 255 - 0.5) / 0.25),
        ({"mean": [0.0, 1.0, 2.0], "std": [1, 2, 4]},
         lambda x: (x - np.arange(3)[:, None, None]) / np.array([1, 2, 4])[:, None, None]),
    ],
)  # fmt: skip
def test_normalisation_is_the_files(tmp_path, attributes, expected):
    path = write(tmp_path / "own.h5", shape=(3, 5, 4), dtype="uint8", **attributes)
    shard = from_file(path).shards[0]
    assert shard.x.dtype.itemsize == 1
    np.testing.assert_allclose(
        shard.on("cpu").x.numpy(), expected(shard.x.numpy().astype(float)), rtol=1e-5, atol=1e-6
    )


def test_groups_are_the_truth(tmp_path):
    path = write(tmp_path / "own.h5")
    with h5py.File(path, "r+") as h5:
        h5["groups"] = [7, 2, 7]
    federation = from_file(path)
    assert federation.groups.tolist() == [7, 2, 7]
    assert federation.truth.same.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_fixed_length_strings_are_strings(tmp_path):
    path = write(
        tmp_path / "own.h5", name=np.bytes_("mine"), class_names=np.array([b"a", b"b", b"c"])
    )
    with fedfile.reading(path) as file:
        assert (file.header.name, file.header.class_names) == ("mine", ("a", "b", "c"))


EXPORTS = [
    {"dataset": "digits", "clients": 20},
    {"dataset": "digits", "clients": 6, "partition": "pfllib-dir", "alpha": 0.5, "seed": 4},
    {"dataset": "digits", "clients": 9, "partition": "dirichlet", "fraction": 0.5},
    {"dataset": "groups", "clients": 9, "groups": 2, "seed": 1},
]


@pytest.mark.parametrize("flags", EXPORTS, ids=lambda f: f.get("partition", f["dataset"]))
def test_export_is_the_same_federation(tmp_path, flags):
    path = str(tmp_path / "fed.h5")
    assert main(["export", "--out", path, *(f"--{n}={v}" for n, v in flags.items())]) == 0
    made, read = prepare(RunConfig(**flags)), from_file(path, clients=flags["clients"])
    assert read.data_hash == made.data_hash == data_hash(read.shards)
    assert read.partition_hash == made.partition_hash
    assert read.sizes == made.sizes
    for name in ("labels", "test_samples"):
        assert np.array_equal(getattr(read, name), getattr(made, name))
    assert (read.truth is None) == (made.truth is None)
    if made.truth is not None:
        assert np.array_equal(read.truth.same, made.truth.same)
    with h5py.File(path, "r+") as h5:  # without the stored hashes the data themselves count
        for client in h5["clients"].values():
            del client.attrs["sha256"]
    assert from_file(path, clients=flags["clients"]).data_hash == made.data_hash


def test_changed_content_is_noticed_by_whoever_reads_it(tmp_path):
    path = str(tmp_path / "fed.h5")
    main(["export", "--out", path, "--dataset=groups", "--clients=3", "--groups=3"])
    with h5py.File(path, "r+") as h5:
        h5["clients/0001/test/x"][4, 0] += 1
    federation = from_file(path)  # rank 0 reads no samples
    assert federation.shards[0].n == 32
    with pytest.raises(ValueError, match="client 1 is not what its attribute sha256 says"):
        federation.shards[1]
    with pytest.raises(ValueError, match="client 1 is not what"):
        list(federation.shards)


def test_values_that_are_not_finite_are_named(tmp_path):
    path = write(tmp_path / "own.h5")
    with h5py.File(path, "r+") as h5:
        h5["clients/0002/train/x"][3, 1] = np.nan
    with pytest.raises(ValueError, match="client 2, train/x holds NaN or infinity"):
        from_file(path)


# ---------------------------------------------------------------------------- flags


def test_clients_come_from_the_file(tmp_path):
    path = str(write(tmp_path / "own.h5"))
    assert experiment("fedapa", {"dataset": path}, look=True).run.clients == 3
    asked = experiment("fedapa", {"dataset": path, "holdout_clients": 1}, look=True)
    assert asked.run.clients == 2
    with pytest.raises(ValueError, match="holdout_clients is 3, expected less than 3"):
        experiment("fedapa", {"dataset": path, "holdout_clients": 3}, look=True)
    with pytest.raises(ValueError, match=r"clients is 4, but .*own\.h5 holds 3: leave --clients"):
        from_file(Path(path), clients=4)
    with pytest.raises(ValueError, match="clients is 3 beside 1 holdout_clients, but"):
        from_file(Path(path), holdout_clients=1)


@pytest.mark.parametrize(
    ("shape", "model"),
    [((4,), "mlp"), ((12, 3), "mlp"), ((1, 8, 8), "mlp"), ((3, 16, 20), "lenet5")],
)
def test_default_model_takes_the_input(tmp_path, shape, model):
    path = str(write(tmp_path / "own.h5", shape=shape))
    assert experiment("fedapa", {"dataset": path}, look=True).run.model == model


@pytest.mark.parametrize(
    "flag", ["partition", "alpha", "balance", "min_test", "groups", "data_dir"]
)
def test_flags_that_mean_nothing_with_a_file(flag):
    asked = experiment("fedapa", {"dataset": "fed.h5"})
    (complaint,) = meaningless(asked, [flag])
    assert complaint.startswith(f"{flag} has no effect with dataset=/")


def test_only_rank_0_looks_into_the_file():
    """The other ranks parse the same words, maybe on a node that does not see the file."""
    request = cli.read(["fedapa", "--dataset", "nowhere.h5"])
    with pytest.raises(ValueError, match=r"nowhere\.h5 is not there: check the path"):
        start.settle(request)


def test_path_is_kept_whole(tmp_path, monkeypatch):
    """A run can be resumed from another folder."""
    write(tmp_path / "own.h5")
    monkeypatch.chdir(tmp_path)
    settled = start.settle(cli.read(["fedapa", "--dataset", "own.h5"]))
    assert settled.experiment.run.dataset == str(tmp_path / "own.h5")
    assert settled.folder.path.name.startswith("fedapa-own-")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no HDF5", "cannot be read as HDF5"), (None, "holds no group /clients")],
)
def test_file_that_is_none(tmp_path, content, message):
    path = tmp_path / "own.h5"
    if content is None:
        h5py.File(path, "w").close()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        start.settle(cli.read(["fedapa", "--dataset", str(path)]))


def test_faulty_file_is_refused_with_the_first_faults(tmp_path):
    path = write(tmp_path / "own.h5", sizes=[(3, 1)] * 4)
    with h5py.File(path, "r+") as h5:
        for i in range(4):
            h5[f"clients/{i:04d}/train/y"][1] = 9
    with pytest.raises(ValueError, match=r"client 0, train/y: .*; client 2, .*; \.\.\.\. All"):
        from_file(path, clients=4)


# ---------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The default problem for 6 clients and one outside."""
    path = tmp_path_factory.mktemp("fed") / "fed.h5"
    assert main(["export", "--out", str(path), "--clients=7", "--classes_per_client=5",
                 "--assignment=random", "--seed=3"]) == 0  # fmt: skip
    return path


@pytest.mark.mpi
def test_run_from_a_file_ends_like_the_run_that_partitions(tmp_path, exported):
    launch = Launcher(tmp_path, ("--rounds=3", "--seed=3", "--holdout_clients=1"))
    flags = ("--model=mlp", "--batch_size=16", "--lr=0.05")
    file = launch(3, f"--dataset={exported}", *flags)
    own = launch(None, "--clients=6", "--classes_per_client=5", "--assignment=random")
    assert file.fingerprint == own.fingerprint
    with file.results() as a, own.results() as b:
        assert a.attrs["data_hash"] == b.attrs["data_hash"]
        assert np.array_equal(a["labels"][:], b["labels"][:])


@pytest.mark.mpi
def test_refusals_are_said_once_and_exit_2(tmp_path, exported):
    launch = Launcher(tmp_path)
    for flags, message in (
        ((f"--dataset={exported}", "--clients=6"), "clients is 6, but"),
        ((f"--dataset={tmp_path / 'nowhere.h5'}",), "is not there"),
    ):
        done = launch(2, *flags)
        assert done.rc == 2
        assert done.err.count("fedapa-mpi: error") == 1
        assert message in done.err
        assert not done.folder.exists()


@pytest.mark.mpi
def test_feature_vectors_with_a_perceptron_and_a_file_that_moves(tmp_path):
    path = write(tmp_path / "vectors.h5", sizes=[(30, 12), (20, 9), (16, 8), (2, 1)])
    launch = Launcher(tmp_path, ("--lr=0.05", "--batch_size=8"))
    whole = launch(None, f"--dataset={path}", "--rounds=6")
    with whole.results() as h5:
        assert h5["accuracy/post/macro"][-1] > 0.6  # a third by chance
    begun = launch(3, f"--dataset={path}", "--rounds=3")
    moved = path.rename(tmp_path / "moved.h5")
    ended = launch(2, f"--dataset={moved}", "--rounds=6", folder=begun.folder, resume=True)
    assert ended.fingerprint == whole.fingerprint
    with h5py.File(moved, "r+") as h5:
        h5["clients/0000/train/x"][0] += 1
    other = launch(None, f"--dataset={moved}", "--rounds=7", folder=begun.folder, resume=True)
    assert other.rc == 2
    assert "data_hash of the stored run is" in other.err
    assert "--dataset the same federation file" in other.err


RECURRENT = '''
from torch import nn


class Last(nn.Module):
    """Reads a sequence [B, T, D] and hands on what it remembers at the end."""

    def __init__(self, features):
        super().__init__()
        self.cell = nn.GRU(features, 8, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


def recurrent(input_shape, classes):
    return nn.Sequential(Last(input_shape[1]), nn.Linear(8, classes))
'''


@pytest.mark.mpi
def test_sequences_with_a_users_model(tmp_path):
    (tmp_path / "readers.py").write_text(RECURRENT)
    path = write(tmp_path / "sequences.h5", sizes=[(24, 10)] * 4, shape=(6, 2))
    launch = Launcher(tmp_path, (f"--dataset={path}", "--model=readers:recurrent", "--rounds=3"))
    env = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{tmp_path}"}
    many, one = (launch(ranks, "--lr=0.1", "--batch_size=8", env=env) for ranks in (2, None))
    assert many.fingerprint == one.fingerprint
    with many.results() as h5:
        loss = np.nanmean(h5["loss"][:], axis=1)
    assert loss[-1] < loss[0]


@pytest.mark.mpi
def test_a_thousand_clients(tmp_path):
    path = write(tmp_path / "many.h5", sizes=[(8, 4)] * 1000)
    often = ("--eval_every=2", "--checkpoint_every=2")
    flags = ("--rounds=2", "--join_low=0.05", "--join_high=0.05", *often)
    done = Launcher(tmp_path)(3, "fedapa", f"--dataset={path}", *flags)
    assert done.rc == 0, done.err
    with done.results() as h5:
        assert h5["sampled"][:].sum(axis=1).tolist() == [50, 50]
        assert h5["A"].shape == (2, 1000, 1000)
        assert not np.isnan(h5["accuracy/post/client"][-1]).any()

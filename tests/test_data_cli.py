"""``python -m fedapa_mpi.data``: export, inspect, validate."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from launching import environment
from test_federation_file import write

from fedapa_mpi.data import fedfile
from fedapa_mpi.data.__main__ import FIELDS, main
from fedapa_mpi.data.faults import all_faults

GOOD = [(5, 2), (4, 3), (6, 1)]


@pytest.fixture
def good(tmp_path) -> Path:
    return write(tmp_path / "own.h5", sizes=GOOD)


# ---------------------------------------------------------------------------- export


def test_export_writes_the_documented_layout(tmp_path, capsys):
    path = tmp_path / "fed.h5"
    assert main(["export", "--out", str(path), "--clients", "10", "--classes-per-client=5"]) == 0
    assert f"{path}: 10 clients with " in capsys.readouterr().out
    with h5py.File(path) as h5:
        assert list(h5["clients"]) == [f"{i:04d}" for i in range(10)]
        assert {name: h5.attrs[name] for name in ("format", "classes", "scale", "clients")} == {
            "format": 1, "classes": 10, "scale": 16.0, "clients": 10,
        }  # fmt: skip
        assert h5.attrs["input_shape"].tolist() == [64]
        assert (h5.attrs["mean"].tolist(), h5.attrs["std"].tolist()) == ([0.5], [0.5])
        assert (h5.attrs["name"], h5.attrs["partition"]) == ("digits", "pathological")
        x, y = h5["clients/0003/test/x"], h5["clients/0003/test/y"]
        assert (x.dtype, y.dtype) == (np.uint8, np.int64)
        assert x.shape == (*y.shape, 64)
    assert main(["validate", str(path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fed.h5"]


def test_export_refuses_an_existing_file(good, capsys):
    before = good.read_bytes()
    assert main(["export", "--out", str(good)]) == 2
    assert "own.h5 exists: choose another name" in capsys.readouterr().err
    assert good.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out is None, expected the name of a new file"),
        (["--out=fed.txt"], "--out is fed.txt, expected .* ends in .h5 or .hdf5"),
        (["--out=no/such/fed.h5"], "no/such is no folder"),
        (["--out=fed.h5", "--rounds=3"], "rounds"),
        (["--out=fed.h5", "--clients=x"], "clients"),
        (["--out=fed.h5", "--alpha=1"], "alpha has no effect with partition=pathological"),
        (["--out=fed.h5", "--groups=3"], "groups has no effect with dataset=digits"),
        (["--out=fed.h5", "--dataset=other.h5"], "expected a built-in set"),
        (["--out=fed.h5", "--clients=12"], "pathological partition: .* do not fit 12 clients"),
    ],
)
def test_export_refusals(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("fedapa-mpi: error: ")
    assert re.search(message, line), line
    assert not list(tmp_path.iterdir())


def test_failed_export_leaves_nothing(tmp_path):
    def clients():
        yield {"x": np.zeros((1, 2), "f4"), "y": np.zeros(1, int)} | {
            "x_test": np.zeros((0, 2), "f4"), "y_test": np.zeros(0, int),
        }  # fmt: skip
        raise RuntimeError("the data went away")

    with pytest.raises(RuntimeError):
        fedfile.write(tmp_path / "fed.h5", fedfile.Header(2, (2,)), clients())
    assert not list(tmp_path.iterdir())


def test_export_help_lists_its_flags_only(capsys):
    assert main(["export", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{field}" in text for field in FIELDS)
    assert "--rounds" not in text


# ---------------------------------------------------------------------------- inspect


def test_inspect_prints_sizes_and_classes(good, capsys):
    with h5py.File(good, "r+") as h5:
        h5["clients/0001/train/y"][:] = [0, 2, 2, 0]
        h5["groups"] = [3, 4, 3]
        h5.attrs["class_names"] = ["ant", "bee", "cat"]
    assert main(["inspect", str(good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "classes: 3" in lines
    assert "class_names: ant, bee, cat" in lines
    assert "client  group  train  test  class:training samples" in lines
    assert "     1      4      4     3  0:2 2:2" in lines
    assert lines[-1] == "3 clients with 15 training and 6 test samples of 3 classes"


def test_inspect_of_a_faulty_file_says_so(good, capsys):
    with h5py.File(good, "r+") as h5:
        del h5["clients/0001"]
    assert main(["inspect", str(good)]) == 2
    assert "client 1: there is no /clients/0001" in capsys.readouterr().err


def test_inspect_ends_in_peace_when_nobody_reads_on(good):
    """As in ``inspect fed.h5 | head``."""
    command = f"{sys.executable} -m fedapa_mpi.data inspect {good} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, env=environment()
    )
    assert done.stderr == b""


# ---------------------------------------------------------------------------- validate


def spoil(path: Path, place: str, array: object) -> None:
    with h5py.File(path, "r+") as h5:
        h5.pop(place, None)
        if array is not None:
            h5[place] = array


@pytest.mark.parametrize(
    ("place", "array", "fault"),
    [
        ("clients/0001", None, "client 1: there is no /clients/0001"),
        ("clients/0001/test", None, "client 1, test/x: there is no such dataset"),
        ("clients/0001/test/y", None, "client 1, test/y: there is no such dataset"),
        ("clients/0002/train/x", np.zeros((6, 5), "f4"),
         "client 2, train/x: shape [6, 5], expected [samples, 4]"),
        ("clients/0002/train/x", np.float32(1),
         "client 2, train/x: shape [], expected [samples, 4]"),
        ("clients/0000/train/x", np.zeros((5, 4)),
         "client 0, train/x: dtype float64, expected uint8 or float32"),
        ("clients/0000/train/y", np.zeros(5),
         "client 0, train/y: dtype float64, expected integers"),
        ("clients/0000/train/y", np.zeros((5, 1), int),
         "client 0, train/y: shape [5, 1], expected [samples]"),
        ("clients/0000/test/y", np.array([0, 3]),
         "client 0, test/y: 1 of 2 labels are out of range, first 3 of sample 1, expected 0 to 2"),
        ("clients/0000/test/y", np.array([-1, -2]),
         "client 0, test/y: 2 of 2 labels are out of range, first -1 of sample 0, expected 0 to 2"),
        ("clients/0000/test/y", np.zeros(4, int), "client 0, test/y: 4 labels for 2 samples in x"),
        ("clients/0001/train/x", np.float32([[0] * 4, [0, 1, np.nan, np.inf], [0] * 4, [0] * 4]),
         "client 1, train/x: 2 of 16 values are NaN or infinite, first in sample 1"),
        ("clients/12", h5py.Empty("f4"),
         "/clients/12 is not the name of a client: expected 0000, 0001, ..."),
        ("groups", np.zeros(2, int),
         "/groups is int64 [2], expected one integer for each of 3 clients"),
    ],
)  # fmt: skip
def test_validate_names_client_split_and_field(good, capsys, place, array, fault):
    spoil(good, place, array)
    assert main(["validate", str(good)]) == 1
    assert f"{good}: {fault}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("format", 2, "attribute format is 2, expected 1"),
        ("format", None, "attribute format is missing, expected 1"),
        ("classes", None, "attribute classes is missing, expected a number above 0"),
        ("classes", 0, "attribute classes is 0, expected a number above 0"),
        ("classes", "three", "attribute classes is three, expected a number above 0"),
        ("input_shape", None, "attribute input_shape is missing, expected the shape of one sample"),
        ("input_shape", [0, 4], "attribute input_shape is [0, 4], expected the shape"),
        ("scale", 0.0, "attribute scale is 0.0, expected numbers other than 0"),
        ("std", [1.0, 0.0], "attribute std is [1.0, 0.0], expected numbers other than 0"),
        ("mean", np.nan, "attribute mean is nan, expected numbers"),
        ("mean", "half", "attribute mean is half, expected numbers"),
        ("mean", [0.0, 0.5], "attributes mean and std have 2 and 1 numbers, expected one of each"),
        ("scale", [1.0, 2.0], "attribute scale has 2 numbers, expected one"),
        ("class_names", ["a", "b"], "attribute class_names has 2 names for 3 classes"),
        ("clients", 5, "client 4: there is no /clients/0004"),
        ("clients", 2, "attribute clients is 2, but there is a client 2"),
    ],
)
def test_validate_looks_at_the_attributes(good, capsys, name, value, fault):
    with h5py.File(good, "r+") as h5:
        h5.attrs.pop(name, None)
        if value is not None:
            h5.attrs[name] = value
    assert main(["validate", str(good)]) == 1
    assert fault in capsys.readouterr().out


def test_validate_names_every_fault(good, capsys):
    spoil(good, "clients/0000/train/y", np.full(5, 7))
    spoil(good, "clients/0001/test/x", np.full((3, 4), np.nan, "f4"))
    spoil(good, "clients/0001/train/y", None)
    spoil(good, "clients/0002/test/x", np.zeros((1, 4), "i8"))
    assert main(["validate", str(good)]) == 1
    *faults, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in faults] == [
        "client 0, train/y", "client 1, train/y", "client 2, test/x", "client 1, test/x",
    ]  # fmt: skip
    assert last == f"{good}: 4 faults"


def test_validate_compares_hashes(tmp_path, capsys):
    path = tmp_path / "fed.h5"
    main(["export", "--out", str(path), "--dataset=groups", "--clients=4"])
    with h5py.File(path, "r+") as h5:
        for i in (1, 3):
            h5[f"clients/{i:04d}/train/x"][0, 0] = 5
    assert main(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert "client 1: the content is not what attribute sha256 says" in out
    assert "client 3: the content is not what" in out
    assert "2 faults" in out


def test_validate_wants_somebody_who_trains(tmp_path):
    path = write(tmp_path / "own.h5", sizes=[(0, 3), (0, 0)])
    assert all_faults(str(path)) == ["no client has a training sample"]


def test_validate_of_a_good_file(good, capsys):
    assert main(["validate", str(good)]) == 0
    assert capsys.readouterr().out == (
        f"{good}: no faults, 3 clients with 15 training and 6 test samples of 3 classes\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["delete", "x.h5"], "'delete' is no command, expected one of export, inspect, validate"),
        (["validate"], "nothing is given, expected the path of one file"),
        (["validate", "a.h5", "b.h5"], "a.h5 b.h5 is given, expected the path of one file"),
        (["inspect", "nowhere.h5"], "nowhere.h5 is not there"),
    ],
)
def test_words_that_make_no_sense(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_help_tells_the_format(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "/clients/0000/train/x" in out
    assert max(map(len, out.splitlines())) <= 100
    assert main([]) == 2


def test_inspect_and_validate_need_no_torch(good):
    code = (
        "import sys; from fedapa_mpi.data.__main__ import main;"
        f"rc = main(['validate', {str(good)!r}]) + main(['inspect', {str(good)!r}]);"
        "sys.exit(rc or 'torch' in sys.modules or 'mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr

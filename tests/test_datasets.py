"""Data sets (built-in, IDX files, search order) and a client's shard."""

import gzip
import hashlib
import pickle
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedapa_mpi.data import datasets, partition, sources
from fedapa_mpi.data.datasets import Dataset, load, parse_idx
from fedapa_mpi.data.federation import Shard, data_hash, shards
from fedapa_mpi.data.partition import Partition
from fedapa_mpi.data.sources import FASHION_MNIST, locate


def idx(array: np.ndarray) -> bytes:
    """An IDX file's content, written by hand from the format's description."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_set(folder: Path, packed: bool = False, first: int = 0) -> dict[str, np.ndarray]:
    """Four small files in `folder`; `first` marks the set, to tell copies apart."""
    rng = np.random.default_rng(first)
    arrays = {}
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, n in (("train", 5), ("t10k", 3)):
        images = rng.integers(0, 256, (n, 28, 28))
        images[0, 0, 0] = first
        arrays[f"{prefix}-images-idx3-ubyte"] = images
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(0, 10, n)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No copy anywhere outside tmp_path, and no network."""

    def no_network(self, root):
        raise RuntimeError(f"Error downloading into {root}:\n no route to host")

    monkeypatch.delenv("FEDAPA_DATA", raising=False)
    monkeypatch.setattr(
        datasets, "FASHION_MNIST", replace(FASHION_MNIST, system=tmp_path / "system", md5=())
    )
    monkeypatch.setattr(sources, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sources.Source, "download", no_network)
    return tmp_path


def marker(data: Dataset) -> int:
    return int(data.x_train[0, 0, 0, 0])


# ---------------------------------------------------------------------------- digits


def test_digits_are_whole_stratified_and_fixed():
    data = load("digits")
    assert data.x_train.shape == (1347, 64)
    assert data.x_test.shape == (450, 64)
    assert (data.x_train.dtype, data.y_train.dtype) == (np.uint8, np.int64)
    assert (data.x_train.min(), data.x_train.max()) == (0, 16)
    assert data.input_shape == (64,)
    train, test = (np.bincount(y, minlength=10) for y in (data.y_train, data.y_test))
    assert np.abs(test - (train + test) / 4).max() <= 1  # a quarter of every class
    again = load("digits")
    assert np.array_equal(data.x_train, again.x_train)
    assert np.array_equal(data.y_test, again.y_test)


def test_digits_normalise_to_minus_one_to_one():
    data = load("digits")
    all_of_them = Partition((np.arange(len(data.y_train)),), (np.arange(len(data.y_test)),))
    shard = shards(data, all_of_them)[0].on("cpu")
    assert (shard.x.min().item(), shard.x.max().item()) == (-1.0, 1.0)


def test_defaults_belong_to_known_sets():
    assert set(datasets.DEFAULTS) <= set(datasets.names())
    assert datasets.DEFAULTS["digits"] == {
        "model": "mlp",
        "rounds": 60,
        "batch_size": 16,
        "lr": 0.05,
    }


def test_unknown_set_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown data set 'fminst': choose one of digits, fmnist"):
        load("fminst")


def test_importing_stays_cheap():
    """torch, torchvision and scikit-learn cost seconds per rank: none may come with the module."""
    code = (
        "import sys, fedapa_mpi.data.datasets, fedapa_mpi.data.partition;"
        "import fedapa_mpi.data.faults, fedapa_mpi.data.groups, fedapa_mpi.data.__main__;"
        "print([m for m in ('torch', 'torchvision', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------------------- finding files


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("folder", [".", "FashionMNIST/raw"])
def test_all_layouts_are_read(nowhere, packed, folder):
    arrays = write_set(nowhere / "mine" / folder, packed)
    data = load("fmnist", str(nowhere / "mine"))
    assert data.x_train.shape == (5, 1, 28, 28)
    assert (data.x_train.dtype, data.y_test.dtype) == (np.uint8, np.int64)
    assert np.array_equal(data.x_train[:, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(data.y_train, arrays["train-labels-idx1-ubyte"])
    assert np.array_equal(data.x_test[:, 0], arrays["t10k-images-idx3-ubyte"])
    assert np.array_equal(data.y_test, arrays["t10k-labels-idx1-ubyte"])
    assert (data.classes, data.scale, data.mean, data.std) == (10, 255.0, (0.5,), (0.5,))


def test_search_order(nowhere, monkeypatch):
    """Each place wins over all that come after it."""
    monkeypatch.setenv("FEDAPA_DATA", str(nowhere / "environment"))
    mine = str(nowhere / "mine")
    for number, place in enumerate(["cache", "system", "environment", "mine"], start=1):
        write_set(nowhere / place, packed=place == "system", first=number)
        assert marker(load("fmnist", mine)) == number
    assert marker(load("fmnist")) == 3


def test_copy_elsewhere_is_used_and_said(nowhere, caplog):
    write_set(nowhere / "system", first=7)
    assert marker(load("fmnist", str(nowhere / "mine"))) == 7
    assert f"is not in --data_dir {nowhere / 'mine'}: using {nowhere / 'system'}" in caplog.text


def test_incomplete_copy_is_passed_over_and_said(nowhere, caplog):
    write_set(nowhere / "mine", first=1)
    write_set(nowhere / "system", first=2)
    (nowhere / "mine" / "t10k-labels-idx1-ubyte").unlink()
    assert marker(load("fmnist", str(nowhere / "mine"))) == 2
    assert f"{nowhere / 'mine'} is incomplete: no t10k-labels-idx1-ubyte" in caplog.text


def test_nothing_found_names_every_place_and_the_cure(nowhere, monkeypatch):
    monkeypatch.setenv("FEDAPA_DATA", str(nowhere / "environment"))
    with pytest.raises(FileNotFoundError) as caught:
        load("fmnist", str(nowhere / "mine"))
    text = str(caught.value)
    for place in ("mine", "environment", "system", "cache"):
        assert str(nowhere / place) in text
        assert str(nowhere / place / "FashionMNIST/raw") in text
    for cure in (
        "Debian package dataset-fashion-mnist",
        "--data_dir",
        "FEDAPA_DATA",
        "no route to",
    ):
        assert cure in text
    assert "t10k-labels-idx1-ubyte" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("data_dir", "environment", "expected"),
    [("mine", "environment", "mine"), (None, "environment", "environment"), (None, None, "cache")],
)
def test_download_goes_where_the_user_said(nowhere, monkeypatch, data_dir, environment, expected):
    def fetch(self, root):
        write_set(root / self.folder, first=9)

    monkeypatch.setattr(sources.Source, "download", fetch)
    if environment:
        monkeypatch.setenv("FEDAPA_DATA", str(nowhere / environment))
    assert marker(load("fmnist", data_dir and str(nowhere / data_dir))) == 9
    assert (nowhere / expected / "FashionMNIST/raw/train-images-idx3-ubyte").exists()
    monkeypatch.setattr(sources.Source, "download", None)
    assert marker(load("fmnist", data_dir and str(nowhere / data_dir))) == 9  # found next time


def test_download_that_brings_nothing_is_an_error(nowhere, monkeypatch):
    monkeypatch.setattr(sources.Source, "download", lambda self, root: None)
    with pytest.raises(FileNotFoundError, match="not there afterwards"):
        load("fmnist")


def test_download_uses_torchvision_with_a_time_limit(monkeypatch, tmp_path):
    import torchvision.datasets

    calls = []

    def fetch(root, download):
        calls.append((root, download, socket.getdefaulttimeout()))

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", fetch)
    FASHION_MNIST.download(tmp_path)
    assert calls == [(str(tmp_path), True, sources.DOWNLOAD_TIMEOUT)]
    assert socket.getdefaulttimeout() is None


def test_installed_fashion_mnist():
    if not FASHION_MNIST.system.is_dir():
        pytest.skip("Debian package dataset-fashion-mnist is not installed")
    paths = locate(FASHION_MNIST, str(FASHION_MNIST.system))
    assert {path.parent for path in paths} == {FASHION_MNIST.system}
    data = load("fmnist", str(FASHION_MNIST.system))
    assert data.x_train.shape == (60000, 1, 28, 28)
    assert data.x_test.shape == (10000, 1, 28, 28)
    assert np.bincount(data.y_train).tolist() == [6000] * 10
    assert np.bincount(data.y_test).tolist() == [1000] * 10
    assert data.x_train.max() == 255
    assert data.x_train.mean() / 255 == pytest.approx(0.2860, abs=1e-4)  # the published mean


# ---------------------------------------------------------------------------- MNIST and CIFAR


def test_mnist_is_found_in_torchvisions_layout(nowhere, monkeypatch):
    arrays = write_set(nowhere / "mine" / "MNIST/raw", packed=True)
    monkeypatch.setattr(datasets, "MNIST", replace(sources.MNIST, md5=md5_of(arrays)))
    data = load("mnist", str(nowhere / "mine"))
    assert data.x_train.shape == (5, 1, 28, 28)
    assert np.array_equal(data.y_test, arrays["t10k-labels-idx1-ubyte"])
    assert (data.name, data.classes, data.mean, data.std) == ("mnist", 10, (0.5,), (0.5,))


def md5_of(arrays: dict[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(hashlib.md5(idx(array)).hexdigest() for array in arrays.values())


@pytest.mark.parametrize(("name", "title"), [("mnist", "MNIST"), ("fmnist", "Fashion-MNIST")])
def test_idx_files_of_another_set_are_refused(nowhere, monkeypatch, name, title):
    """MNIST and its successors have the same file names: the checksum tells them apart."""
    monkeypatch.setattr(datasets, "FASHION_MNIST", FASHION_MNIST)
    write_set(nowhere / "mine")
    with pytest.raises(ValueError, match=rf"{title}'s is [0-9a-f]+: it is damaged or belongs to"):
        load(name, str(nowhere / "mine"))


CIFAR = {
    "cifar10": (
        sources.CIFAR10,
        "labels",
        {f"data_batch_{k}": 2 for k in range(1, 6)} | {"test_batch": 3},
    ),
    "cifar100": (sources.CIFAR100, "fine_labels", {"train": 6, "test": 4}),
}


def write_cifar(folder: Path, name: str, monkeypatch) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Small batches as the original archives hold them; torchvision is told their checksums."""
    import torchvision.datasets

    source, key, sizes = CIFAR[name]
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True)
    batches, md5 = {}, {}
    for file, n in sizes.items():
        x, y = rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()
        batches[file] = x, y
        content = pickle.dumps({"data": x, key: y, "batch_label": file}, protocol=2)
        (folder / file).write_bytes(content)
        md5[file] = hashlib.md5(content).hexdigest()
    reader = getattr(torchvision.datasets, source.torchvision_class)
    content = pickle.dumps({reader.meta["key"]: [f"class {c}" for c in range(10)]}, protocol=2)
    (folder / reader.meta["filename"]).write_bytes(content)
    meta = {**reader.meta, "md5": hashlib.md5(content).hexdigest()}
    monkeypatch.setattr(reader, "meta", meta)
    monkeypatch.setattr(reader, "train_list", [[f, md5[f]] for f, _ in reader.train_list])
    monkeypatch.setattr(reader, "test_list", [[f, md5[f]] for f, _ in reader.test_list])
    return batches


@pytest.mark.parametrize("place", ["as downloaded", "anywhere"])
@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_batches_become_images(nowhere, monkeypatch, name, classes, place):
    folder = nowhere / "mine" / CIFAR[name][0].folder
    batches = write_cifar(folder, name, monkeypatch)
    data = load(name, str(folder if place == "anywhere" else nowhere / "mine"))
    *train, test = batches.values()
    assert np.array_equal(
        data.x_train, np.concatenate([x for x, _ in train]).reshape(-1, 3, 32, 32)
    )
    assert data.y_train.tolist() == [label for _, y in train for label in y]
    assert np.array_equal(data.x_test, test[0].reshape(-1, 3, 32, 32))
    assert (data.x_train.dtype, data.y_train.dtype) == (np.uint8, np.int64)
    assert data.x_train.flags.c_contiguous
    assert (data.classes, data.input_shape, data.scale) == (classes, (3, 32, 32), 255.0)
    assert (data.mean, data.std) == ((0.5,), (0.5,))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_damaged_cifar_file_is_named_with_both_checksums(nowhere, monkeypatch, name):
    folder = nowhere / "mine" / CIFAR[name][0].folder
    *_, last = write_cifar(folder, name, monkeypatch)
    content = (folder / last).read_bytes()
    (folder / last).write_bytes(content[:-1] + b"?")
    with pytest.raises(ValueError, match=r"has the MD5 checksum .* damaged") as caught:
        load(name, str(nowhere / "mine"))
    assert str(folder / last) in str(caught.value)
    assert hashlib.md5(content).hexdigest() in str(caught.value)


def test_damaged_cifar_labels_file_is_named_too(nowhere, monkeypatch):
    folder = nowhere / "mine" / sources.CIFAR10.folder
    write_cifar(folder, "cifar10", monkeypatch)
    (folder / "batches.meta").write_bytes(b"")
    with pytest.raises(ValueError, match=r"batches\.meta has the MD5 checksum"):
        load("cifar10", str(nowhere / "mine"))


@pytest.mark.parametrize(("name", "file"), [("mnist", "t10k-labels"), ("cifar10", "data_batch_5")])
def test_missing_set_says_how_to_get_it(nowhere, name, file):
    with pytest.raises(FileNotFoundError, match=f"no copy found.*{file}.*--data_dir"):
        load(name, str(nowhere / "mine"))


def test_cifar_archives_are_not_read_packed(nowhere, monkeypatch):
    folder = nowhere / "mine" / sources.CIFAR100.folder
    write_cifar(folder, "cifar100", monkeypatch)
    (folder / "train").rename(folder / "train.gz")
    with pytest.raises(FileNotFoundError, match="no copy found"):
        load("cifar100", str(nowhere / "mine"))


def test_each_source_names_the_files_that_torchvision_reads():
    import torchvision.datasets

    for source in (sources.CIFAR10, sources.CIFAR100):
        reader = getattr(torchvision.datasets, source.torchvision_class)
        listed = [file for file, _ in [*reader.train_list, *reader.test_list]]
        assert list(source.files) == [*listed, reader.meta["filename"]]
        assert source.folder == reader.base_folder
    for source in (sources.MNIST, FASHION_MNIST):
        reader = getattr(torchvision.datasets, source.torchvision_class)
        assert {f"{file}.gz" for file in source.files} == {file for file, _ in reader.resources}


# ---------------------------------------------------------------------------- damaged files

GOOD = idx(np.arange(12).reshape(3, 2, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (GOOD[:7], "not an IDX file"),
        (b"<html>404</html>" + GOOD, "starts with '3c68746d', expected '00000803'"),
        (idx(np.arange(3)), "starts with '00000801', expected '00000803'"),
        (GOOD[:-1], "holds 11 values, its header promises 12"),
        (GOOD + b"x", "holds 13 values"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_damaged_file_is_named(tmp_path, content, message, packed):
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=message) as caught:
        parse_idx(path, datasets._content(path), 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [gzip.compress(GOOD)[:-9], GOOD, gzip.compress(GOOD)[:12] + b"\xff" * 20]
)
def test_damaged_gzip_is_named(tmp_path, content):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is a damaged gzip file") as caught:
        parse_idx(path, datasets._content(path), 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train-labels-idx1-ubyte", np.zeros(4), "5 images, but .*train-labels.* 4 labels"),
        ("t10k-labels-idx1-ubyte", np.array([0, 10, 1]), "t10k-labels.* the label 10: expected 0"),
        ("t10k-images-idx3-ubyte", np.zeros((3, 8, 8)), "belong to different data sets"),
    ],
)
def test_files_that_do_not_fit_together(nowhere, name, array, message):
    write_set(nowhere / "mine")
    (nowhere / "mine" / name).write_bytes(idx(array))
    with pytest.raises(ValueError, match=message):
        load("fmnist", str(nowhere / "mine"))


# ---------------------------------------------------------------------------- shards


def colour_set() -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(
        name="colour",
        x_train=rng.integers(0, 256, (10, 3, 4, 5), dtype=np.uint8),
        y_train=rng.integers(0, 7, 10),
        x_test=rng.integers(0, 256, (6, 3, 4, 5), dtype=np.uint8),
        y_test=rng.integers(0, 7, 6),
        classes=7,
        scale=255.0,
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.25, 2.0),
    )


def two_shards(data: Dataset) -> list[Shard]:
    """One shard with samples, one without any."""
    nothing = np.array([], np.int64)
    return shards(data, Partition((np.array([3, 1, 8]), nothing), (np.array([5, 0]), nothing)))


def test_shards_hold_the_right_rows_as_copies():
    data = colour_set()
    first, empty = two_shards(data)
    assert first.x.dtype == torch.uint8
    assert np.array_equal(first.x.numpy(), data.x_train[[3, 1, 8]])
    assert first.y.tolist() == data.y_train[[3, 1, 8]].tolist()
    assert np.array_equal(first.x_test.numpy(), data.x_test[[5, 0]])
    assert (first.n, first.n_test, empty.n, empty.n_test) == (3, 2, 0, 0)
    assert first.input_shape == empty.input_shape == data.input_shape == (3, 4, 5)
    assert first.x.is_contiguous()
    first.x.zero_()
    assert data.x_train[3].any()


@pytest.mark.parametrize("which", [0, 1], ids=["samples", "empty"])
def test_shard_survives_the_message(which):
    shard = two_shards(colour_set())[which]
    message = shard.message()
    assert all(tensor.ndim > 0 for tensor in message.values())
    again = Shard.from_message({name: tensor.clone() for name, tensor in message.items()})
    assert data_hash([again]) == data_hash([shard])
    assert again.input_shape == (3, 4, 5)
    assert (again.classes, again.scale) == (7, 255.0)
    assert (again.mean, again.std) == ((0.1, 0.2, 0.3), (0.5, 0.25, 2.0))


def test_normalisation_is_per_channel():
    data = colour_set()
    first, empty = two_shards(data)
    ready = first.on(torch.device("cpu"))
    for rows, x in (([3, 1, 8], ready.x), ([5, 0], ready.x_test)):
        source = (data.x_train if len(rows) == 3 else data.x_test)[rows].astype(np.float64)
        for channel in range(3):
            expected = (source[:, channel] / 255 - data.mean[channel]) / data.std[channel]
            np.testing.assert_allclose(x[:, channel].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert ready.x.dtype == torch.float32
    assert (ready.scale, ready.mean, ready.std) == (1.0, (0.0,), (1.0,))
    assert ready.y.tolist() == first.y.tolist()
    assert first.x.dtype == torch.uint8  # the source is as it was
    assert empty.on("cpu").x.shape == (0, 3, 4, 5)
    assert empty.on("cpu").x_test.dtype == torch.float32


def test_normalising_twice_changes_nothing():
    ready = two_shards(colour_set())[0].on("cpu")
    assert torch.equal(ready.on("cpu").x, ready.x)


def test_one_mean_serves_all_channels():
    shard = replace(two_shards(colour_set())[0], mean=(0.5,), std=(0.5,))
    expected = (shard.x.numpy() / 255 - 0.5) / 0.5
    np.testing.assert_allclose(shard.on("cpu").x.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_data_hash_sees_everything():
    both = two_shards(colour_set())
    first = both[0]
    other_pixel = first.x.clone()
    other_pixel[0, 0, 0, 0] ^= 1
    variants = [
        both,
        both[::-1],
        both[:1],
        [replace(first, x=other_pixel), both[1]],
        [replace(first, y=first.y.flip(0) + 1), both[1]],
        [replace(first, x=first.x.view(torch.int8)), both[1]],
        [replace(first, mean=(0.1, 0.2, 0.4)), both[1]],
        [replace(first, classes=8), both[1]],
        [
            first,
            replace(
                both[1], x=both[1].x[:, :2], x_test=both[1].x_test[:, :2], mean=(0.5,), std=(1,)
            ),
        ],
    ]
    hashes = [data_hash(variant) for variant in variants]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == data_hash(two_shards(colour_set()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, dtype=torch.int64)}, r"training labels are torch.int64 \[2\]"),
        ({"y_test": torch.zeros(2)}, r"test labels are torch.float32 \[2\]"),
        ({"x_test": torch.zeros(2, 3, 4, 4)}, r"test samples have shape \[3, 4, 4\]"),
        ({"mean": (0.1, 0.2)}, "2 means and 3 standard deviations"),
        ({"mean": (0.1, 0.2), "std": (1.0, 1.0)}, r"or 3 \(one per channel\)"),
    ],
)
def test_shard_refuses_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        replace(two_shards(colour_set())[0], **change)


def test_digits_partition_becomes_shards():
    """The default problem end to end: 20 clients, two classes each."""
    data = load("digits")
    parts = partition.split("pathological", data.y_train, data.y_test, clients=20, seed=0)
    dealt = shards(data, parts)
    assert [set(shard.y.tolist()) for shard in dealt[:4]] == [{0, 1}] * 4
    assert all(set(shard.y_test.tolist()) <= set(shard.y.tolist()) for shard in dealt)
    assert sum(shard.n for shard in dealt) > 1347 - 20 * 2


@pytest.mark.parametrize("name", ["pfllib-pat", "pfllib-dir"])
def test_merged_partition_takes_rows_from_both_sets(name):
    data = load("digits")
    parts = partition.split(name, data.y_train, data.y_test, clients=10, seed=0)
    dealt = shards(data, parts)
    rows = np.concatenate([np.concatenate([s.x.numpy(), s.x_test.numpy()]) for s in dealt])
    everything = np.concatenate([data.x_train, data.x_test])
    assert rows.shape == everything.shape
    assert sorted(map(bytes, rows)) == sorted(map(bytes, everything))
    together = np.concatenate([data.y_train, data.y_test])
    for shard, train, test in zip(dealt, parts.train, parts.test):
        assert shard.y.tolist() == together[train].tolist()
        assert shard.y_test.tolist() == together[test].tolist()
        assert np.array_equal(shard.x.numpy(), everything[train])

"""The synthetic groups: whose data are alike, and whether A finds out."""

import h5py
import numpy as np
import pytest
from launching import Launcher

from fedapa_mpi.config import RunConfig, experiment, meaningless
from fedapa_mpi.data import groups
from fedapa_mpi.data.federation import data_hash
from fedapa_mpi.data.prepare import prepare
from fedapa_mpi.recovery import Truth, alike, blocks, recovery


def made(**changes):
    return prepare(RunConfig(**{"dataset": "groups", "clients": 24} | changes))


@pytest.mark.parametrize(("clients", "count"), [(24, 4), (20, 3), (5, 5), (7, 1)])
def test_groups_differ_in_size_by_one_at_most(clients, count):
    sizes = np.bincount(groups.members(clients, count, seed=0), minlength=count)
    assert len(sizes) == count
    assert np.ptp(sizes) <= 1


def test_membership_is_drawn():
    first, second = (groups.members(24, 4, seed).tolist() for seed in (0, 1))
    assert first != second
    assert first != sorted(first)


def test_first_clients_do_not_depend_on_how_many_there_are():
    """So that held-out clients change nothing for the others."""
    few, many = made(clients=10), made(clients=10, holdout_clients=3)
    assert (len(few.shards), len(many.shards)) == (10, 13)
    assert data_hash(many.shards[:10]) == few.data_hash


def test_federation_says_what_it_is():
    federation = made(group_samples=20)
    assert federation.sizes == [20] * 24
    assert federation.test_samples.tolist() == [groups.TEST_SAMPLES] * 24
    assert federation.labels.shape == (24, federation.classes)
    assert federation.labels.sum(1).tolist() == federation.sizes
    shard = federation.shards[3]
    assert shard.input_shape == federation.input_shape == (groups.FEATURES,)
    assert np.array_equal(federation.groups, groups.members(24, 4, 0))
    assert np.array_equal(federation.truth.same, alike(federation.groups))
    assert federation.truth.what == "of the same group"


def test_equal_flags_give_equal_data_and_others_do_not():
    hashes = [
        made(**changes).data_hash
        for changes in (
            {}, {"seed": 1}, {"groups": 3}, {"group_noise": 1.0}, {"group_samples": 33},
        )
    ]  # fmt: skip
    assert len(set(hashes)) == 5
    assert made().data_hash == hashes[0]


def test_group_means_and_noise_are_those_asked_for():
    """Class means of one group lie close together for its clients, far apart between groups."""
    draw = {"samples": 4000, "noise": 0.5, "seed": 0}
    same, also, other = (
        groups.draw(group, client, **draw) for group, client in ((0, 0), (0, 1), (1, 2))
    )

    def means(data):
        return np.stack([data.x[data.y == c].mean(0) for c in range(groups.CLASSES)])

    near = np.linalg.norm(means(same) - means(also), axis=1)
    far = np.linalg.norm(means(same) - means(other), axis=1)
    assert near.max() < 0.4
    assert far.min() > 4
    spread = np.concatenate([same.x[same.y == c] - means(same)[c] for c in range(groups.CLASSES)])
    assert spread.std() == pytest.approx(0.5, rel=0.02)


def test_inputs_have_unit_variance_after_normalisation():
    x = np.concatenate([shard.on("cpu").x.numpy() for shard in made(group_samples=200).shards])
    assert x.std() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("flag", ["partition", "alpha", "fraction", "min_train", "assignment"])
def test_partition_flags_mean_nothing_here(flag):
    asked = experiment("fedapa", {"dataset": "groups"})
    (complaint,) = meaningless(asked, [flag])
    assert complaint.startswith(
        f"{flag} has no effect with dataset=groups: it needs dataset digits"
    )


@pytest.mark.parametrize("flag", ["groups", "group_noise", "group_samples"])
def test_group_flags_mean_nothing_elsewhere(flag):
    (complaint,) = meaningless(experiment("fedapa", {}), [flag])
    assert complaint == f"{flag} has no effect with dataset=digits: it needs dataset groups"


def test_truth_of_the_first_clients():
    truth = Truth("of the same group", alike(np.array([0, 1, 0, 1])))
    assert truth.of_first(3).same.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_blocks_are_clients_with_the_same_classes():
    labels = np.array([[1, 0, 2], [5, 0, 1], [0, 1, 0], [0, 0, 0]])
    assert blocks(labels).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert blocks(np.ones((1000, 100))).all()  # no [M, M, C] in between


@pytest.mark.mpi
def test_centred_gradient_finds_the_groups(tmp_path):
    flags = ("--dataset=groups", "--clients=24", "--groups=4", "--rounds=30", "--eval_every=30")
    done = Launcher(tmp_path, flags)(3, "fedapa", "--gradient=centred", "--eta=0.1")
    with h5py.File(done.folder / "results.h5") as h5:
        found = recovery(h5["A"][-1], alike(h5["groups"][:]))
        local = h5["accuracy/post/macro"][-1]
    assert found is not None
    assert found.auc >= 0.99
    assert f"of the same group {found.inside:.4f}, with others" in done.out
    assert f"AUC {found.auc:.4f}" in done.out
    assert local > 0.7  # local training reaches 0.64: sharing matters

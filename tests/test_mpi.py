"""Ring 3: real launches. The same bits whatever the layout, and really many processes."""

from __future__ import annotations

import numpy as np
import pytest
from launching import OPENMPI, Launcher

from fedapa_mpi.recovery import blocks, recovery

pytestmark = pytest.mark.mpi

# 6 clients: one, three or six per rank; classes 0-4 for three of them, 5-9 for the others
SMALL = ("--clients=6", "--classes_per_client=5", "--rounds=4", "--seed=3")
ORDERS = {"parallel": (), "sequential": ("--order=sequential",)}
openmpi = pytest.mark.skipif(
    not OPENMPI, reason="FEDAPA_OPENMPI does not name an environment with Open MPI"
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("mpi"), SMALL)


@pytest.fixture(scope="module")
def alone(launch):
    """One process without mpirun: the specification, by order."""
    return {order: launch(None, *flags) for order, flags in ORDERS.items()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_any_number_of_ranks_gives_the_same_bits(launch, alone, order, ranks):
    assert launch(ranks, *ORDERS[order]).fingerprint == alone[order].fingerprint


def test_orders_differ(alone):
    assert alone["parallel"].fingerprint != alone["sequential"].fingerprint


@openmpi
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [3, 7])
def test_open_mpi_gives_the_same_bits(launch, alone, order, ranks):
    done = launch(ranks, *ORDERS[order], mpi="openmpi")
    assert done.fingerprint == alone[order].fingerprint
    with done.results() as h5:
        assert "Open MPI" in h5.attrs["mpi"]


@pytest.mark.parametrize("ranks", [3, 7])
def test_order_of_arrival_does_not_matter(launch, alone, ranks):
    assert launch(ranks, fault="shuffle").fingerprint == alone["parallel"].fingerprint


@pytest.mark.parametrize(
    "flags",
    [
        ("fedavg", "--unsampled=broadcast", "--eval_every=3", "--eval_points=recv"),
        ("local", "--eval_every=2", "--eval_points=post"),
        ("fedapa", "--dropout=0.4", "--client_opt=reset", "--join_low=0.3"),
        ("fedapa", "--preset=official", "--min_train=1", "--min_test=1"),
    ],
)
def test_other_settings_give_the_same_bits(launch, flags):
    assert launch(3, *flags).fingerprint == launch(None, *flags).fingerprint


def test_a_slow_client_delays_the_aggregate_and_nothing_else(launch, alone):
    slow = launch(3, fault="delay:train:1:2", env={"FAULT_SECONDS": "3"})
    assert slow.fingerprint == alone["parallel"].fingerprint
    with slow.results() as h5:
        rank = h5["trained_by/rank"][1, 1]
        compute, wait = h5["seconds/compute"][1], h5["seconds/wait"][1]
    other = 3 - rank
    assert compute[rank] >= 3
    assert wait[0] >= 2.9  # the server
    assert compute[other] < 1


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """What a user starts without arguments, on 21 ranks."""
    launch = Launcher(tmp_path_factory.mktemp("main"))
    return launch(21, timeout=300), launch(None)


def test_main_job_on_21_ranks_equals_one_process(main_job):
    many, one = main_job
    assert many.fingerprint == one.fingerprint


def test_main_job_trains_in_twenty_processes_and_not_at_the_server(main_job):
    with main_job[0].results() as h5:
        pids, ranks = h5["trained_by/pid"][:], h5["trained_by/rank"][:]
        sampled = h5["sampled"][:]
    assert ((pids >= 0) == sampled).all()
    assert len(np.unique(pids[sampled])) == 20
    assert set(ranks[sampled]) == set(range(1, 21))
    assert main_job[0].status["pid"] not in pids


def test_main_job_counts_the_bytes_of_the_formula(main_job):
    P = 64 * 64 + 64 + 64 * 32 + 32  # the extractor of the perceptron
    with main_job[0].results() as h5:
        for way in ("down", "up"):
            assert (h5[f"bytes/{way}"][:] == 4 * P * h5["sampled"][:]).all()


def test_main_job_learns_who_shares_classes(main_job):
    with main_job[0].results() as h5:
        found = recovery(h5["A"][-1], blocks(h5["labels"][:]))
    assert found is not None
    assert found.auc >= 0.95


def test_centred_gradient_learns_it_better(tmp_path):
    done = Launcher(tmp_path)(3, "--gradient=centred", "--eta=0.1")
    with done.results() as h5:
        found = recovery(h5["A"][-1], blocks(h5["labels"][:]))
    assert found is not None
    assert found.auc >= 0.99


@pytest.mark.slow
def test_waiting_ranks_leave_the_cores_to_the_one_that_trains(tmp_path):
    """20 ranks wait, one trains: at most 15 % slower than with one rank waiting, in turn."""
    ratios = []
    for repetition in range(3):
        # epochs enough that a process's first training, which loads things, does not matter
        flags = ("--dataset=fmnist", "--partition=iid", "--clients=20", "--rounds=3", "--epochs=8",
                 "--join_low=0", "--join_high=0.05", "--eval_every=3",
                 f"--seed={repetition}")  # fmt: skip
        launch = Launcher(tmp_path / str(repetition), flags)
        seconds = []
        for ranks in (2, 21):
            with launch(ranks, "local", timeout=600).results() as h5:
                seconds.append(np.nansum(h5["seconds/compute"][1:], axis=1).mean())
        ratios.append(seconds[1] / seconds[0])
    print("ratios", ratios)
    assert np.median(ratios) <= 1.15, ratios

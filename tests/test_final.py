"""After the last round: the next download for everyone, and clients outside the federation."""

import numpy as np
import pytest
from launching import Launcher

SMALL = ("--clients=6", "--classes_per_client=5", "--rounds=3", "--holdout_clients=4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    launch = Launcher(tmp_path_factory.mktemp("final"), SMALL)
    return {
        "alone": launch(None),
        "ranks": launch(3),
        "fedavg": launch(None, "fedavg", "--join_low=1"),
        "without": launch(None, "--holdout_clients=0"),
    }


@pytest.mark.mpi
def test_it_does_not_depend_on_the_layout(runs):
    assert runs["alone"].fingerprint == runs["ranks"].fingerprint


def test_held_out_clients_take_no_part(runs):
    with runs["alone"].results() as h5:
        assert h5["sampled"].shape == (3, 6)
        assert h5["labels"].shape[0] == 6
        assert h5["final/holdout/recv/client"].shape == (4,)
        assert h5["final/recv/client"].shape == (6,)
    with runs["alone"].checkpoint() as h5:
        assert len(h5["clients"]) == 6


def test_held_out_clients_learn_from_one_training(runs):
    with runs["alone"].results() as h5:
        recv, post = (h5[f"final/holdout/{point}/macro"][()] for point in ("recv", "post"))
    assert post > recv + 0.2


def test_the_output_is_printed(runs):
    assert "recv of round 4" in runs["alone"].out
    assert "held-out post" in runs["alone"].out
    assert "held-out" not in runs["without"].out


def test_fedavg_delivers_the_same_model_to_everyone(runs):
    """Every client then scores with the global w, unsampled ones too."""
    with runs["fedavg"].results() as h5, runs["fedavg"].checkpoint() as stored:
        w = stored["server/w"][:]
        # the held-out clients start from that same w: some of them share classes with members
        assert np.isfinite(h5["final/holdout/recv/client"][:]).all()
        assert np.isfinite(w).all()
        bytes_down = h5["bytes/down"][:]
    assert (bytes_down == 4 * len(w)).all()  # deliveries are not traffic


def test_more_rounds_measure_it_again(runs, tmp_path):
    launch = Launcher(tmp_path, SMALL)
    done = launch(None)
    assert done.fingerprint == runs["alone"].fingerprint
    more = launch(None, "--rounds=5", folder=done.folder, resume=True)
    assert "recv of round 6" in more.out
    with more.results() as h5:
        assert len(h5["round"]) == 5

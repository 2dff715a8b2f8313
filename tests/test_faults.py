"""Ring 3: ranks that fail, are killed or are told to stop, and the runs that go on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from launching import FAULTS, OPENMPI, Launcher, environment, mpirun

pytestmark = pytest.mark.mpi

SMALL = ("--clients=4", "--classes_per_client=5", "--rounds=5", "--checkpoint_every=1")
openmpi = pytest.mark.skipif(
    not OPENMPI, reason="FEDAPA_OPENMPI does not name an environment with Open MPI"
)
BOTH = ["mpich", pytest.param("openmpi", marks=openmpi)]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("faults"), SMALL)


@pytest.fixture(scope="module")
def undisturbed(launch):
    return launch(None).fingerprint


# -- killed, and resumed on another number of ranks ----------------------------------------------


@pytest.mark.parametrize(
    ("fault", "mpi", "ranks"),
    [
        ("kill:train:2:3", "mpich", 2),
        ("kill:upload:0:3", "mpich", None),
        ("kill:aggregate:0:3", "mpich", 5),
        ("kill:rename:0:3", "mpich", 2),
        pytest.param("kill:train:2:3", "openmpi", 2, marks=openmpi),
        pytest.param("kill:rename:0:3", "openmpi", None, marks=openmpi),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(launch, undisturbed, fault, mpi, ranks):
    killed = launch(3, fault=fault, mpi=mpi)
    assert killed.rc != 0
    # MPI may tell rank 0 before the launcher ends it
    assert killed.status["status"] in ("running", "failed")
    resumed = launch(ranks, folder=killed.folder, resume=True)
    assert resumed.fingerprint == undisturbed
    assert resumed.status["status"] == "finished"


def test_a_newest_checkpoint_cut_by_a_byte_is_passed_over(launch, undisturbed):
    killed = launch(3, fault="kill:aggregate:0:4")
    newest = sorted((killed.folder / "checkpoints").glob("round-*.h5"))[-1]
    os.truncate(newest, newest.stat().st_size - 1)
    resumed = launch(None, folder=killed.folder, resume=True)
    assert f"{newest} is damaged and not used" in resumed.err
    assert resumed.fingerprint == undisturbed


# -- told to stop --------------------------------------------------------------------------------


@pytest.mark.parametrize("mpi", BOTH)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("term:train:2:3", "SIGTERM"), ("usr1:aggregate:0:3", "SIGUSR1")],
)
def test_a_signal_to_any_rank_stops_in_good_order(launch, undisturbed, fault, reason, mpi):
    stopped = launch(3, fault=fault, mpi=mpi)
    assert stopped.rc == 0, stopped.err
    assert (stopped.status["status"], stopped.status["reason"]) == ("interrupted", reason)
    assert stopped.status["round"] == 3
    assert stopped.out.rstrip().splitlines()[-1].startswith(f"interrupted by {reason} after round")
    assert launch(None, folder=stopped.folder, resume=True).fingerprint == undisturbed


@pytest.fixture(scope="module")
def undisturbed_sequential(launch):
    return launch(None, "--order=sequential").fingerprint


@pytest.mark.parametrize(
    ("ranks", "order"), [(3, "parallel"), (None, "sequential"), (3, "sequential")]
)
def test_a_round_that_outlasts_the_grace_is_given_up(
    launch, undisturbed, undisturbed_sequential, ranks, order
):
    stopped = launch(ranks, f"--order={order}", "--grace=0.001", fault="term:train:3:3")
    assert stopped.rc == 0, stopped.err
    assert (stopped.status["status"], stopped.status["round"]) == ("interrupted", 2)
    resumed = launch(None, folder=stopped.folder, resume=True)
    whole = undisturbed if order == "parallel" else undisturbed_sequential
    assert resumed.fingerprint == whole


def test_max_time_stops_in_good_order(launch, undisturbed):
    stopped = launch(None, "--max_time=1", fault="delay:train:0:2")
    assert (stopped.rc, stopped.status["reason"]) == (0, "max_time")
    assert stopped.status["round"] == 2
    resumed = launch(None, "--max_time=null", folder=stopped.folder, resume=True)
    assert resumed.fingerprint == undisturbed


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", [None, 3])
def test_signals_to_the_launcher_stop_the_run(tmp_path, number, ranks):
    process = start_long_run(tmp_path, ranks)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert f"interrupted by {number.name}" in out


def test_a_second_ctrl_c_aborts_with_130(tmp_path):
    process = start_long_run(tmp_path, None, fault="delay:train:0:3")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def start_long_run(tmp_path, ranks, fault="none"):
    """A run of many rounds, past its second one."""
    command = [*mpirun(ranks), str(FAULTS), fault, "--out", str(tmp_path / "run"), "--clients=4",
               "--classes_per_client=5", "--rounds=100000"]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(more={"PYTHONUNBUFFERED": "1", "FAULT_SECONDS": "20"}),
    )
    for line in process.stdout:
        if line.startswith("round      2/"):
            time.sleep(0.2)  # into the next round
            return process
    raise AssertionError(process.communicate()[1])


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["raise", "exit", "thread"])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("aggregate:0", "rank 0, round 2"),
        ("train:0", "rank 1, client 0, round 2"),
        ("train:3", "rank 2, client 3, round 2"),
    ],
)
def test_an_error_on_any_rank_ends_the_job(launch, what, place, where):
    fails_at_once(launch, f"{what}:{place}:2", where, "mpich")


@openmpi
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("raise:train:3:2", "rank 2, client 3, round 2"),
        ("exit:aggregate:0:2", "rank 0, round 2"),
        ("thread:train:0:2", "rank 1, client 0, round 2"),
    ],
)
def test_an_error_ends_the_job_under_open_mpi(launch, fault, where):
    fails_at_once(launch, fault, where, "openmpi")


def test_an_error_in_one_process(launch):
    fails_at_once(launch, "raise:train:3:2", "rank 0, client 3, round 2", "mpich", None)


def fails_at_once(launch, fault, where, mpi, ranks=3):
    start = time.monotonic()
    failed = launch(ranks, fault=fault, mpi=mpi)
    assert time.monotonic() - start < 10 + 15  # 15 s for starting the ranks
    assert failed.rc != 0
    assert failed.err.count("Traceback (most recent call last)") == 1
    assert f"fedapa-mpi: error on {where}:" in failed.err
    assert failed.status["status"] == "failed"
    assert failed.status["reason"].startswith(where)


def test_a_non_finite_upload_is_never_mixed_in(launch):
    failed = launch(3, fault="nan:upload:1:2")
    assert failed.rc != 0
    assert "client 1 sent NaN or infinity in theta in round 2" in failed.err
    skipped = launch(3, "--on_nonfinite=skip", fault="nan:upload:1:2")
    assert skipped.rc == 0
    with skipped.results() as h5:
        assert h5["sampled"][1, 1]
        assert not h5["answered"][1, 1]
    alone = launch(None, "--on_nonfinite=skip", fault="nan:upload:1:2")
    assert alone.fingerprint == skipped.fingerprint


def test_a_rank_that_hangs_trips_the_watchdog(launch):
    failed = launch(3, "--watchdog=2", fault="fullstop:train:3:2")
    assert failed.rc != 0
    assert "for UPLOAD from rank 2" in failed.err


# -- requests that cannot be carried out ---------------------------------------------------------


@pytest.mark.parametrize("mpi", BOTH)
def test_a_bad_request_is_said_once_and_leaves_nothing(launch, mpi):
    for flags, message in (
        (("--no_such_flag=1",), "no_such_flag"),
        (("--clients=12", "--classes_per_client=2"), "clients"),
        (("--model=lenet5",), "lenet5 needs images"),
    ):
        refused = launch(3, *flags, mpi=mpi)
        assert refused.err.count("fedapa-mpi: error:") == 1, refused.err
        assert message in refused.err
        assert "Traceback" not in refused.err
        assert refused.rc == 2
        assert not refused.folder.exists()


def test_what_a_resume_refuses(launch, tmp_path):
    done = launch(None, "--max_time=0.01")
    for flags, message in (
        (("--eta=0.5",), "eta: stored 0.01, asked 0.5"),
        (("fedavg",), "strategy: stored 'fedapa', asked 'fedavg'"),
        (("--rounds=2",), "rounds: stored 5, asked 2 (only up)"),
    ):
        refused = launch(None, *flags, folder=done.folder, resume=True)
        assert refused.rc == 2
        assert message in refused.err
    empty = launch(None, folder=tmp_path, resume=True)
    assert (empty.rc, "no complete checkpoint" in empty.err) == (2, True)
    used = launch(None, folder=done.folder)
    assert (used.rc, "already holds a run" in used.err) == (2, True)


def test_more_rounds_for_a_finished_run(launch):
    done = launch(None, "--rounds=3")
    again = launch(3, folder=done.folder, resume=True)
    assert again.rc == 0
    assert "is finished" in again.out
    more = launch(2, "--rounds=5", folder=done.folder, resume=True)
    assert more.rc == 0
    assert more.fingerprint != done.fingerprint
    with more.results() as h5:
        assert list(h5["round"]) == [1, 2, 3, 4, 5]


@openmpi
def test_worlds_of_size_one_are_refused(launch):
    """MPICH's mpirun starting Open MPI's mpi4py gives three worlds of one rank."""
    command = [*mpirun(3)[:-1], *mpirun(None, "openmpi"), "-m", "fedapa_mpi.run"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment("openmpi")
    )
    assert done.returncode == 2
    assert done.stderr.count("started as 3 separate worlds of size 1") == 1

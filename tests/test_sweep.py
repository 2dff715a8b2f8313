"""A sweep: what its command line means, and many runs in one launch that disturb nobody."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import subprocess
import sys
import time
from itertools import product
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from launching import OPENMPI, Ended, Launcher, environment

from fedapa_mpi import cli, leading, strategies, sweep
from fedapa_mpi.stopping import StopFlag
from fedapa_mpi.sweep import Variant

openmpi = pytest.mark.skipif(
    not OPENMPI, reason="FEDAPA_OPENMPI does not name an environment with Open MPI"
)
DEALT = ("dataset", "partition", "alpha", "classes_per_client", "min_train", "min_test", "fraction",
         "clients", "holdout_clients", "seed")  # fmt: skip
SMALL = ("--clients=4", "--classes_per_client=5", "--rounds=3", "--checkpoint_every=1")


# -- names and variants ----------------------------------------------------------------------------


def variant(strategy, **flags):
    return Variant(strategy, tuple(flags.items()))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fedavg", [variant("fedavg")]),
        ("local,fedavg", [variant("local"), variant("fedavg")]),
        ("all", [variant(name) for name in strategies.names()]),
        ("fedavg,all", [variant("fedavg"),
                        *(variant(n) for n in strategies.names() if n != "fedavg")]),
        ("fedavg,,fedavg,", [variant("fedavg")]),
        ("fedapa:share=model", [variant("fedapa", share="model")]),
        ("fedapa:gradient=centred,eta=0.1,local",
         [variant("fedapa", gradient="centred", eta="0.1"), variant("local")]),
        ("fedapa:self-weight=0.3", [variant("fedapa", self_weight="0.3")]),
        ("fedapa,fedapa:eta=0.1,fedapa:eta=0.2",
         [variant("fedapa"), variant("fedapa", eta="0.1"), variant("fedapa", eta="0.2")]),
        ("fedavg:model=my.models:net,lr=0.1",
         [variant("fedavg", model="my.models:net", lr="0.1")]),
    ],
)  # fmt: skip
def test_variants(text, found):
    assert sweep.variants(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedprox", "'fedprox' is none of all, "),
        ("fedprox:mu=1", "'fedprox' is none of all, "),
        ("all:eta=0.1", "'all' is none of"),
        ("eta=0.1", "eta=0.1 stands behind no strategy with a colon"),
        ("fedapa,eta=0.1", "eta=0.1 stands behind no strategy with a colon"),
        ("fedapa:", "'' is not flag=value"),
        ("fedapa:eta", "'eta' is not flag=value"),
        ("fedapa:eta=", "'eta=' is not flag=value"),
        ("fedapa:eta=0.1,=3", "'=3' is not flag=value"),
        ("fedapa:seed=3", "seed is no flag of a variant: use --seeds"),
        ("fedapa:eta=0.1,partition=iid", "partition is no flag of a variant: use --partitions"),
        ("fedapa:resume=runs/x", "resume is no flag of a variant"),
        ("fedapa:eval_points=recv,post", "'post' is none of"),
    ],
)
def test_variants_that_are_none(text, message):
    with pytest.raises(ValueError, match="--strategies: ") as refused:
        sweep.variants(text)
    assert message in str(refused.value)


def test_a_variant_names_one_folder():
    name = variant("fedavg", model="a/b:c", lr="0.1").name
    assert name == "fedavg_model=a_b:c_lr=0.1"


# -- the command line ------------------------------------------------------------------------------


def cells(*argv):
    """Folder name -> configuration of each cell, in their order."""
    asked = sweep.read([*argv, "--out=sw"])
    assert str(asked.folder) == "sw"
    return {
        cell.out.removeprefix("sw/"): cli.resolve(cell).flat() | {"resume": cell.resume}
        for cell in asked.cells
    }


def test_order_and_folders_of_the_cells():
    found = cells("--strategies", "local,fedapa:eta=0.1", "--seeds=3,0,3",
                  "--partitions", "pathological,dirichlet")  # fmt: skip
    assert list(found) == [
        f"{name}-{partition}-seed{seed}"
        for seed, partition, name in product(
            (3, 0), ("pathological", "dirichlet"), ("local", "fedapa_eta=0.1")
        )
    ]
    for name, config in found.items():
        assert config["out"] == f"sw/{name}"
        assert config["resume"] == "auto"
        assert name.endswith(f"{config['partition']}-seed{config['seed']}")
        assert config["strategy"] == name.partition("-")[0].partition("_")[0]
        assert config.get("eta", 0.1) == 0.1


def test_without_seeds_and_partitions():
    assert list(cells("--strategies=local")) == ["local-pathological-seed0"]
    assert list(cells("--strategies=local", "--dataset=groups")) == ["local-seed0"]
    out = sweep.read(["--strategies=local"]).folder
    assert out.parts[0] == "runs"
    assert out.name.startswith("sweep-")


def test_a_shared_flag_is_left_out_where_it_has_no_effect():
    found = cells("--strategies=local,fedavg", "--alpha", "0.3", "--classes-per-client=3",
                  "--partitions=pathological,dirichlet,iid")  # fmt: skip
    asked = {name: (c["alpha"], c["classes_per_client"]) for name, c in found.items()}
    for name in ("local", "fedavg"):
        assert asked[f"{name}-pathological-seed0"] == (0.1, 3)
        assert asked[f"{name}-dirichlet-seed0"] == (0.3, 2)
        assert asked[f"{name}-iid-seed0"] == (0.1, 2)


def test_a_variant_s_own_value_goes_first():
    found = cells("--strategies=fedavg,fedavg:lr=0.5,fedavg:min_train=7", "--lr=0.2",
                  "--min_train=5")  # fmt: skip
    asked = [(c["lr"], c["min_train"]) for c in found.values()]
    assert asked == [(0.2, 5), (0.5, 5), (0.2, 7)]


@pytest.mark.parametrize("more", [(), ("--min_train=20",)])
@pytest.mark.parametrize("dataset", ["digits", "fmnist"])
def test_the_same_partition_for_every_method_of_a_seed(dataset, more):
    presets = [
        f"{name}:preset={preset}"
        for name in strategies.names()
        for preset in getattr(strategies.config_class(name), "PRESETS", {})
        if hasattr(strategies.config_class(name), "preset")
    ]
    assert "fedapa:preset=official" in presets
    found = cells("--strategies", ",".join(["all", *presets]), "--dataset", dataset, *more)
    assert len(found) == len(strategies.names()) + len(presets)
    asked = {tuple(config[name] for name in DEALT) for config in found.values()}
    assert len(asked) == 1
    official = next(c for name, c in found.items() if "preset=official" in name)
    assert (official["order"], official["drop_last"]) == ("sequential", "true")
    assert official["min_train"] == (20 if more else 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--seeds=0", "--strategies is missing"),
        ("--strategies=,", "there is nothing to run"),
        ("--strategies=local --seeds=", "there is nothing to run"),
        ("--strategies=local --seeds=0,x", "seed"),
        ("--strategies=local --seeds=-1", "seed is -1"),
        ("--strategies=local --partitions=iid,heaps", "partition is heaps"),
        ("--strategies=local --no_such_flag=1", "--no_such_flag is no flag that all strategies"),
        ("--strategies=all --eta=0.1", "behind its name, as in apple:eta=0.1"),
        ("--strategies=local --alpha=0.3", "alpha: no effect in any run of this sweep"),
        ("--strategies=local --partitions=pathological,iid --alpha=1", "alpha: no effect"),
        ("--strategies=local,fedavg:eta=0.1", "eta"),
        ("--strategies=fedapa:eta=-1", "eta is -1"),
        ("--strategies=fedapa:adapt=false,eta=0.1", "eta has no effect with adapt=False"),
        ("--strategies=fedapa:preset=best", "preset"),
        ("--strategies=fedavg --order=sequential", "fedavg knows only parallel"),
        ("--strategies=local --lr=0", "lr is 0"),
        ("--strategies=local --seed=3", "--seed is no flag of a sweep: use --seeds"),
        ("--strategies=local --partition=iid", "use --partitions"),
        ("--strategies=local --resume=auto", "--resume is no flag of a sweep: repeat"),
        ("--strategies=local --config=x.yaml", "--config is no flag of a sweep"),
        ("--strategies=local --max_time=soon", "duration is 'soon'"),
        ("--strategies", "--strategies needs a value"),
        ("local", "'local' is not a flag"),
    ],
)
def test_what_is_refused_before_anything_runs(argv, message):
    with pytest.raises(ValueError) as refused:
        sweep.read(argv.split())
    assert message in str(refused.value)


@pytest.mark.parametrize("argv", [[], ["--help"], ["--strategies=all", "-h"]])
def test_help(argv):
    with pytest.raises(cli.Finished, match="--partitions"):
        sweep.read(argv)


@pytest.mark.parametrize(
    ("argv", "status"), [("--help", 0), ("--strategies=all --seeds=0,1 --nonsense=1", 2)]
)
def test_answers_need_neither_torch_nor_mpi(argv, status):
    code = (
        "import sys; from fedapa_mpi import sweep; status = sweep.main(sys.argv[1:]); "
        "print({'torch', 'mpi4py'} & set(sys.modules)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv.split()], capture_output=True,
                          text=True, timeout=60, env=environment())  # fmt: skip
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("set()\n")
    assert ("usage: " in done.stdout) == (status == 0)
    assert done.stderr.count("fedapa-mpi: error:") == (status == 2)


def test_a_large_sweep_is_read_quickly():
    """Each rank does it, and parsers are slow to make."""
    argv = ["--strategies=all,fedapa:preset=official", "--seeds=0,1,2",
            "--partitions=pathological,dirichlet"]  # fmt: skip
    sweep.read(argv)
    start = time.process_time()
    assert len(sweep.read(argv).cells) >= 6 * len(strategies.names())
    assert time.process_time() - start < 5


# -- rank 0's loop, with runs that do nothing ------------------------------------------------------


@pytest.fixture
def loop(monkeypatch):
    """Runs the loop; ``each`` is called for each run, with its folder. Returns what there was."""

    def lead(asked, each, flag=None):
        flag, ran, words = flag or StopFlag(), [], []
        here = SimpleNamespace(agree=words.append)
        guard = SimpleNamespace(tell=None)

        def run(settled, *rest, sweep):
            assert sweep
            guard.tell = "of a run"
            ran.append(settled.folder.path.name)
            each(settled, flag)
            return 0

        monkeypatch.setattr(leading, "lead", run)
        status = sweep.lead(asked, here, flag, guard)
        return SimpleNamespace(status=status, ran=ran, words=words, flag=flag, guard=guard)

    return lead


def three(tmp_path, *argv):
    return sweep.read(["--strategies=local", "--seeds=0,1,2", f"--out={tmp_path / 'sw'}", *argv])


def test_max_time_is_that_of_the_whole_sweep(tmp_path, loop, capsys):
    asked = three(tmp_path, "--max_time=0.2")
    assert asked.max_time == 0.2
    done = loop(asked, lambda settled, flag: time.sleep(0.15))
    assert done.status == 0
    assert len(done.ran) == len(done.words) == 2
    assert done.flag.reason == "max_time"
    assert "3 runs, 0 failed, 1 not started" in capsys.readouterr().out


def test_an_error_after_a_run_is_not_written_into_its_status(tmp_path, loop):
    guard = loop(three(tmp_path), lambda settled, flag: None).guard
    assert guard.tell("an error that belongs to no run") is None


def test_only_a_run_that_ended_on_all_ranks_is_passed_over(tmp_path, loop):
    """A rank that hangs is a TimeoutError, which is an OSError: the next run could not begin."""

    def hang(settled, flag):
        raise TimeoutError("rank 2 says nothing")

    with pytest.raises(TimeoutError):
        loop(three(tmp_path), hang)


def test_a_folder_that_cannot_be_one_is_one_failure(tmp_path, loop, capsys):
    folder = tmp_path / "sw" / "local-pathological-seed1"
    folder.parent.mkdir()
    folder.write_text("a file is in the way")
    done = loop(three(tmp_path), lambda settled, flag: None)
    assert done.status == 1
    assert done.ran == ["local-pathological-seed0", "local-pathological-seed2"]
    assert len(done.words) == 2
    assert "3 runs, 1 failed" in capsys.readouterr().out


def test_out_that_cannot_be_a_folder_is_refused_at_once(tmp_path, loop, capsys):
    (tmp_path / "sw").write_text("")
    done = loop(three(tmp_path), lambda settled, flag: None)
    assert (done.status, done.ran, done.words) == (2, [], [])
    assert capsys.readouterr().err.count("fedapa-mpi: error: --out") == 1


# -- real launches ---------------------------------------------------------------------------------

mpi_only = pytest.mark.mpi
METHODS = ("local", "fedavg", "fedapa:preset=official")
STRATEGIES = f"--strategies={','.join(METHODS)}"
GRID = (STRATEGIES, "--seeds=0,1", "--partitions=pathological,dirichlet")
FIRST, SECOND, THIRD = (
    f"{name}-pathological-seed0" for name in ("local", "fedavg", "fedapa_preset=official")
)


def cell(ended: Ended, name: str) -> Ended:
    """One run of a sweep that has ended."""
    return dataclasses.replace(ended, folder=ended.folder / name)


def fingerprints(ended: Ended) -> dict[str, str | None]:
    """By the runs' names, None for one that has not finished."""
    found = {}
    for path in sorted(ended.folder.glob("*/status.json")):
        status = json.loads(path.read_text())
        found[path.parent.name] = status.get("fingerprint")
        assert (status["status"] == "finished") == bool(status.get("fingerprint"))
    return found


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("sweeps"), SMALL, "sweep")


@pytest.fixture(scope="module")
def one_process(launch):
    """The whole grid without mpirun."""
    done = launch(None, *GRID)
    assert done.rc == 0, done.err
    return done


@pytest.fixture(scope="module")
def right(one_process):
    """Every run's fingerprint, undisturbed."""
    return fingerprints(one_process)


def test_one_process_runs_them_all(one_process, right):
    assert len(right) == 12
    assert all(right.values())
    assert len(set(right.values())) == 12
    last = one_process.out.rstrip().splitlines()[-1]
    assert last == (
        f"sweep: 12 runs, 0 failed, 0 not started; tables: "
        f"python -m fedapa_mpi.report {one_process.folder}"
    )
    lines = one_process.out.rstrip().splitlines()[:-1]
    assert len(lines) == 12
    for line in lines:
        name = line.split()[0].rpartition("/")[2]
        assert f"fingerprint {right[name][:12]}" in line
        assert "post 0." in line


def test_a_finished_sweep_repeated_runs_nothing(launch, one_process):
    before = {path: path.stat().st_mtime_ns for path in one_process.folder.rglob("*")}
    again = launch(None, *GRID, folder=one_process.folder)
    assert again.rc == 0
    assert again.err.count(": finished before") == 12
    assert "12 runs, 0 failed" in again.out
    assert {path: path.stat().st_mtime_ns for path in one_process.folder.rglob("*")} == before


@mpi_only
def test_ranks_give_the_bits_of_one_process(launch, right):
    done = launch(3, *GRID)
    assert done.rc == 0, done.err
    assert fingerprints(done) == right


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("local-dirichlet-seed1", ("local", "--partition=dirichlet", "--seed=1")),
        (
            "fedapa_preset=official-dirichlet-seed0",
            ("fedapa", "--preset=official", "--partition=dirichlet",
             "--min_train=1", "--min_test=1"),
        ),
    ],
)  # fmt: skip
def test_a_run_of_its_own_gives_the_same_bits(tmp_path, right, name, flags):
    common = [flag for flag in SMALL if "classes" not in flag or "dirichlet" not in name]
    assert Launcher(tmp_path, tuple(common))(None, *flags).fingerprint == right[name]


FORMS = (
    "fedapa:preset=official",
    "fedamp:form=cosine",
    "fedphp:teaching=kd",
    "apple:downloads=1",
    "pfedhn:share=extractor",
    "pfedhn:order=parallel",
    "fedproto:aggregation=weighted",
)


def every_form(folder, ranks):
    """A sweep over all methods and their second forms, some clients failing to answer."""
    launch = Launcher(folder, ("--clients=4", "--rounds=3", "--holdout_clients=1"), "sweep")
    return launch(ranks, f"--strategies=all,{','.join(FORMS)}", "--partitions=dirichlet",
                  "--alpha=0.3", "--dropout=0.2", "--seeds=5", timeout=300)  # fmt: skip


@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    return every_form(tmp_path_factory.mktemp("methods"), None)


@pytest.mark.mpi
def test_every_method_gives_the_same_bits_on_three_ranks(every_method, tmp_path):
    found = fingerprints(every_form(tmp_path, 3))
    assert None not in found.values()
    assert found == fingerprints(every_method)


def test_held_out_clients_of_every_method(every_method):
    for path in every_method.folder.glob("*/results.h5"):
        none = path.parent.name.startswith(("apple", "pfedhn"))  # not available, says the docstring
        with h5py.File(path) as h5:
            for point in ("recv", "post"):
                assert np.isnan(h5[f"final/holdout/{point}/client"][:]).all() == none, path


def test_every_method_gets_the_same_conditions(every_method):
    assert every_method.rc == 0, every_method.err
    names = {path.parent.name for path in every_method.folder.glob("*/results.h5")}
    assert len(names) == len(strategies.names()) + len(FORMS)
    sampled, hashes = [], set()
    for name in names:
        with h5py.File(every_method.folder / name / "results.h5") as h5:
            sampled.append(h5["sampled"][:])
            hashes.add((h5.attrs["partition_hash"], h5.attrs["data_hash"]))
    assert len(hashes) == 1
    assert all(np.array_equal(one, sampled[0]) for one in sampled)
    assert sampled[0].any(axis=1).all()


def test_every_method_starts_from_the_same_model(every_method):
    """What the sampled clients of round 1 get is the initial model, where nothing is learned yet.

    pfedhn makes models of its own, and apple adds up equal ones, which rounds.
    """
    losses = []
    for name in {*strategies.names()} - {"pfedhn", "apple"}:
        with h5py.File(every_method.folder / f"{name}-dirichlet-seed5/results.h5") as h5:
            losses.append(np.where(h5["sampled"][0], h5["test_loss/recv/client"][0], 0))
    assert losses[0].any()
    for loss in losses[1:]:
        np.testing.assert_allclose(loss, losses[0], rtol=1e-6)


# -- failures --------------------------------------------------------------------------------------


def failed_in_the_middle(launch, right, ended, reason, mpi="mpich", ranks=3):
    """The second of three runs failed and nobody else noticed; repeated, it alone runs again."""
    assert ended.rc == 1, ended.err
    assert "3 runs, 1 failed, 0 not started" in ended.out.rstrip().splitlines()[-1]
    assert fingerprints(ended) == {FIRST: right[FIRST], SECOND: None, THIRD: right[THIRD]}
    status = cell(ended, SECOND).status
    assert status["status"] == "failed"
    assert reason in status["reason"]
    at_the_end = ended.err[ended.err.rindex(str(cell(ended, SECOND).folder)) :]
    assert status["reason"] in at_the_end
    assert "Traceback" not in at_the_end
    assert ended.err.count("Traceback (most recent call last)") == 1
    again = launch(ranks, STRATEGIES, folder=ended.folder, mpi=mpi)
    assert again.rc == 0, again.err
    assert again.err.count(": finished before") == 2
    assert fingerprints(again) == {name: right[name] for name in (FIRST, SECOND, THIRD)}


SECOND_RUN = {"FAULT_TURN": "2"}


@pytest.mark.parametrize(
    ("mpi", "ranks"),
    [
        pytest.param("mpich", 3, marks=mpi_only),
        pytest.param("openmpi", 3, marks=[mpi_only, openmpi]),
        ("mpich", None),
    ],
)
def test_a_run_that_fails_is_reported_and_no_other_is_lost(launch, right, mpi, ranks):
    ended = launch(ranks, STRATEGIES, "--seeds=0", fault="raise:train:2:2", mpi=mpi,
                   env=SECOND_RUN)  # fmt: skip
    rank = 0 if ranks is None else 2  # larger clients are given out first
    reason = f"rank {rank}, client 2, round 2: RuntimeError: the injected error"
    failed_in_the_middle(launch, right, ended, reason, mpi, ranks)


@mpi_only
def test_an_upload_with_nan_fails_one_run(launch, right):
    ended = launch(3, STRATEGIES, fault="nan:upload:1:2", env=SECOND_RUN)
    failed_in_the_middle(launch, right, ended, "client 1 sent NaN or infinity in")


@mpi_only
def test_a_signal_stops_the_sweep_and_repeated_it_goes_on(launch, right):
    stopped = launch(3, STRATEGIES, fault="term:train:2:2", env=SECOND_RUN)
    assert stopped.rc == 0, stopped.err
    assert "3 runs, 0 failed, 1 not started" in stopped.out
    assert fingerprints(stopped) == {FIRST: right[FIRST], SECOND: None}
    status = cell(stopped, SECOND).status
    assert (status["status"], status["reason"]) == ("interrupted", "SIGTERM")
    assert status["round"] == 2
    assert f"{THIRD}: not started, the sweep was told to stop by SIGTERM" in stopped.err
    assert not cell(stopped, THIRD).folder.exists()

    # the other ranks wait for states that never come
    unread = launch(3, STRATEGIES, folder=stopped.folder, fault="raise:stored:1:0")
    assert unread.rc == 1, unread.err
    assert fingerprints(unread) == {FIRST: right[FIRST], SECOND: None, THIRD: right[THIRD]}
    assert cell(unread, SECOND).status["status"] == "failed"

    again = launch(3, STRATEGIES, folder=stopped.folder)
    assert again.rc == 0, again.err
    assert fingerprints(again) == {name: right[name] for name in (FIRST, SECOND, THIRD)}


def test_a_run_stopped_after_its_last_round_is_brought_to_its_end(launch, right):
    stopped = launch(None, STRATEGIES, fault="term:aggregate:0:3")
    assert stopped.rc == 0, stopped.err
    assert fingerprints(stopped) == {FIRST: None}
    assert cell(stopped, FIRST).status["round"] == 3
    assert "2 not started" in stopped.out
    again = launch(None, STRATEGIES, folder=stopped.folder)
    assert again.rc == 0, again.err
    assert fingerprints(again) == {name: right[name] for name in (FIRST, SECOND, THIRD)}


@mpi_only
def test_runs_that_cannot_begin_are_failures_with_their_reasons(launch, right):
    folder = launch.base / "held"
    held = folder / THIRD / "lock"
    held.parent.mkdir(parents=True)
    with held.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = launch(3, "--strategies=local,fedavg:model=lenet5,fedapa:preset=official,fedavg",
                      folder=folder)  # fmt: skip
    assert done.rc == 1, done.err
    assert fingerprints(done) == {FIRST: right[FIRST], SECOND: right[SECOND]}
    assert "4 runs, 2 failed" in done.out
    assert "Traceback" not in done.err
    end = done.err.rstrip().splitlines()[-2:]
    assert "fedavg_model=lenet5-pathological-seed0: " in end[0]
    assert "lenet5 needs images" in end[0]
    assert f"{THIRD}: another run (" in end[1]
    assert "is using" in end[1]


@mpi_only
def test_a_rank_that_hangs_ends_the_sweep(launch, right):
    ended = launch(3, STRATEGIES, "--watchdog=3", fault="fullstop:train:2:2", env=SECOND_RUN)
    assert ended.rc not in (0, 2)
    assert "for UPLOAD from rank" in ended.err
    assert fingerprints(ended) == {FIRST: right[FIRST], SECOND: None}
    assert cell(ended, SECOND).status["status"] == "failed"

"""The job scripts: read, run with stand-ins for the cluster's commands, and on a real SLURM.

The last part needs SLURM's daemons (slurm.py says what is missing) and is skipped without them, or
fails if FEDAPA_REQUIRE_SLURM=1.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm
from launching import FAULTS, OPENMPI, OPENMPI_ENV, Ended, Launcher, environment

from fedapa_mpi import cli, strategies
from fedapa_mpi.data import datasets

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "jobs"
SCRIPTS = sorted(JOBS.glob("*.sbatch"))
SHELL = [*SCRIPTS, *sorted(JOBS.glob("*.sh"))]
BIN = Path(sys.executable).parent
PAPER = ("fedapa", "fedavg", "fedamp", "fedphp", "apple", "fedala", "pfedhn", "fedpac", "dbe",
         "fedproto", "fedgh")  # fmt: skip
REQUIRED = os.environ.get("FEDAPA_REQUIRE_SLURM") == "1"


# -- as text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_the_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install '.[dev]'")
    command = [shellcheck, "--shell=bash", "--external-sources", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_sbatch_line_has_its_reason(script):
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert len(lines) > 8
    for line in lines:
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)? +# .{10,}", line), line
    options = " ".join(lines)
    for needed in ("--signal=B:USR1@300", "--requeue", "--open-mode=append"):
        assert needed in options


# -- with stand-ins for mpirun, srun and scontrol ------------------------------------------------

LAUNCHER = """\
#!{python}
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
from fedapa_mpi.store.folder import RunFolder

log = Path({folder!r}, "calls")
def note(text):
    with open(log, "a") as calls:
        print(text, file=calls)

heard = []
def hear(number, frame):
    heard.append(number)
    note(signal.Signals(number).name)

for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, hear)
note(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
kind = os.environ["KIND"]
if kind == "another's":
    os.environ["SLURM_JOB_ID"], kind = "8", "interrupted"
folder = RunFolder(sys.argv[sys.argv.index("--out") + 1])
if kind == "refused":
    sys.exit(2)
if kind == "starting":
    note("starting")
    time.sleep(60)
folder.create()
if kind == "waiting":
    folder.write_status("running", round=0, rounds=9)
    note("running")
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    kind = "interrupted"
if kind == "deaf":
    folder.write_status("running", round=0, rounds=9)
    note("running")
    time.sleep(60)
folder.write_status(kind, round=3, rounds=9, reason=os.environ.get("REASON", "SIGUSR1"))
sys.exit({{"failed": 1, "running": 9}}.get(kind, 0))
"""
SCONTROL = """\
#!/bin/bash
if [ "$1" = show ]; then printf '%s\\n' n1 n2 n3; exit; fi
echo "scontrol $*" >>{folder}/calls
exit ${{SCONTROL_RC:-0}}
"""


class Site:
    """A machine whose mpirun, srun and scontrol only pretend, and note down how they are called."""

    def __init__(self, folder):
        self.folder = folder
        self.calls_file = folder / "calls"
        for name in ("mpirun", "srun"):
            text = LAUNCHER.format(python=sys.executable, root=str(ROOT), folder=str(folder))
            self.program(name, text)
        self.program("scontrol", SCONTROL.format(folder=folder))

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script, *args, job="7", **env):
        """Starts a job script; SLURM's variables are those of job 7, or none with job=None."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI"))}
        if job:
            inherited |= {"SLURM_JOB_ID": job, "SLURM_NTASKS": "3", "SLURM_JOB_NAME": "name"}
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        env = {"KIND": "interrupted", "PATH": path, "VENV": "/nowhere", **env}
        return subprocess.Popen(
            ["bash", str(JOBS / script), *args],
            cwd=self.folder,
            env={**inherited, "FEDAPA_ROOT": str(ROOT), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *args, **kwargs):
        """Runs a job script to its end; its status and what it said."""
        process = self.start(*args, **kwargs)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def calls(self):
        """The calls and signals so far."""
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def requeued(self):
        """What scontrol was asked to requeue."""
        return [c.removeprefix("scontrol requeue ") for c in self.calls() if "requeue" in c]

    def signals(self):
        """What the launcher heard."""
        return [call for call in self.calls() if call.startswith("SIG")]

    def wait_for(self, call):
        """Until a stand-in has noted this."""
        wait_until(lambda: call in self.calls(), call)


def wait_until(condition, what, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {timeout} s"
        time.sleep(0.05)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("kind", "rc", "requeued"),
    [
        ("interrupted", 0, ["7"]),
        ("finished", 0, []),
        ("failed", 1, []),
        ("running", 9, []),
        ("refused", 2, []),
        ("another's", 0, []),
    ],
)
def test_only_an_interrupted_run_is_requeued(site, kind, rc, requeued):
    done, out = site.run("run.sbatch", KIND=kind)
    assert (done, site.requeued()) == (rc, requeued), out
    assert site.calls()[0] == ("mpirun -n 3 python -m fedapa_mpi.run --out runs/name --resume auto")


@pytest.mark.parametrize("kind", ["refused", "finished"])
def test_the_status_of_an_earlier_start_does_not_count(site, kind):
    site.run("run.sbatch")
    site.calls_file.unlink()
    _, out = site.run("run.sbatch", KIND=kind)
    assert site.requeued() == [], out


def test_a_task_of_an_array_is_requeued_alone(site):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    rc, out = site.run("sweep.sbatch", "--rounds", "9", job="10", **array)
    assert (rc, site.requeued()) == (0, ["7_3"]), out
    assert "run fedavg --partition pathological --seed 0 --rounds 9" in site.calls()[0]
    assert "--out runs/name/pathological/fedavg/seed-0 " in site.calls()[0]


@pytest.mark.parametrize("signals", [["USR1"], ["TERM"], ["USR1", "USR1"], ["USR1", "TERM"]])
def test_signals_reach_the_launcher_as_usr1(site, signals):
    job = site.start("run.sbatch", KIND="waiting")
    site.wait_for("running")
    for name in signals:
        job.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.1)
    out, _ = job.communicate(timeout=30)
    assert set(site.signals()) == {"SIGUSR1"}
    assert job.returncode == 0, out
    assert site.requeued() == ([] if "TERM" in signals else ["7"])


@pytest.mark.parametrize(("name", "requeued"), [("USR1", ["7"]), ("TERM", [])])
def test_before_the_status_file_the_launcher_is_killed(site, name, requeued):
    job = site.start("run.sbatch", KIND="starting")
    site.wait_for("starting")
    job.send_signal(signal.Signals[f"SIG{name}"])
    out, _ = job.communicate(timeout=30)
    assert "before the run has begun" in out
    assert (site.signals(), site.requeued()) == ([], requeued)


def test_the_second_ctrl_c_ends_at_once(site):
    job = site.start("run.sbatch", KIND="deaf", job=None)
    site.wait_for("running")
    job.send_signal(signal.SIGINT)
    site.wait_for("SIGUSR1")
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=10)
    assert "INT again: ending at once" in out
    assert site.signals() == ["SIGUSR1"]


def test_a_run_that_was_told_to_terminate_is_not_requeued(site):
    """As srun's tasks are by scancel, while the batch script may not hear of it."""
    rc, out = site.run("run.sbatch", REASON="SIGTERM")
    assert (rc, site.requeued()) == (0, [])
    assert "SIGTERM came" in out


def test_restarts_have_an_end(site):
    rc, out = site.run("run.sbatch", SLURM_RESTART_COUNT="2", MAX_RESTARTS="3")
    assert (rc, site.requeued()) == (0, ["7"]), out
    rc, out = site.run("run.sbatch", SLURM_RESTART_COUNT="3", MAX_RESTARTS="3")
    assert (rc, site.requeued()) == (1, ["7"])
    assert "restarted 3 times and still not finished, and MAX_RESTARTS is 3" in out


def test_a_requeue_that_is_refused_is_said(site):
    rc, out = site.run("run.sbatch", SCONTROL_RC="1")
    assert rc == 1
    assert "cannot requeue job 7" in out


def test_without_slurm_nothing_is_requeued(site):
    rc, out = site.run("run.sbatch", job=None)
    assert (rc, site.requeued()) == (0, [])
    assert "to go on: the same line again" in out
    assert site.calls()[0].startswith("mpirun -n 21 ")


def test_the_folder_of_a_run(site):
    for args, env, folder in (
        ([], {}, "runs/fedapa"),
        ([], {"RUNS": "elsewhere"}, "elsewhere"),
        ([], {"OUT": "a b/c"}, "a b/c"),
        (["local", "--out", "d"], {"OUT": "c"}, "d"),
        (["--out=e"], {}, "e"),
    ):
        site.run("run.sbatch", *args, job=None, KIND="finished", **env)
        assert (site.folder / folder / "status.json").exists()
    assert " -m fedapa_mpi.run local --out d --out d --resume auto" in "\n".join(site.calls())


def test_srun_ends_the_others_when_a_rank_dies(site):
    site.run("run.sbatch", LAUNCHER="srun --mpi=pmi2", RANKS="5", PYTHON="python3.11")
    assert site.calls()[0].startswith("srun --mpi=pmi2 -K1 -n 5 python3.11 -m fedapa_mpi.run ")


def test_several_nodes_have_the_server_on_the_first(site):
    nodes = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    nodes["SLURM_NTASKS_PER_NODE"] = "5"
    site.run("multinode.sbatch", **nodes)
    assert site.calls()[0].startswith("mpirun -host n1:5,n2:4,n3:4 -n 13 python ")
    site.calls_file.unlink()
    site.run("multinode.sbatch", LAUNCHER="srun --mpi=pmix", **nodes)
    assert site.calls()[0].startswith("srun --mpi=pmix -K1 -n 13 python ")
    rc, out = site.run("multinode.sbatch", **nodes | {"SLURM_NTASKS_PER_NODE": "1"})
    assert (rc, "expected the GPUs of a node and 1" in out) == (2, True)


def test_a_script_that_does_not_find_the_clone_says_so(tmp_path):
    env = {**os.environ, "FEDAPA_ROOT": str(tmp_path)}
    done = subprocess.run(
        ["bash", JOBS / "run.sbatch"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "submit from the clone, or set FEDAPA_ROOT" in done.stderr


# -- arrays --------------------------------------------------------------------------------------


def listed(script, tmp_path, **env):
    """The command lines of all cells, after ``fedapa_mpi.run``."""
    done = subprocess.run(
        ["bash", JOBS / script],
        env={**os.environ, "LIST": "1", **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[job]")]
    return [shlex.split(line.partition(" -m fedapa_mpi.run ")[2]) for line in lines]


def last_task(script):
    return int(re.search(r"#SBATCH --array=0-(\d+)", (JOBS / script).read_text())[1])


def test_the_sweep_has_a_task_for_each_cell(tmp_path):
    cells = listed("sweep.sbatch", tmp_path)
    assert len({str(cell) for cell in cells}) == len(cells) == last_task("sweep.sbatch") + 1
    lists = {"STRATEGIES": "local", "SEEDS": "4 5", "PARTITIONS": "iid", "RUNS": "r"}
    assert [cell[:-2] for cell in listed("sweep.sbatch", tmp_path, **lists)] == [
        f"local --partition iid --seed {seed} --out r/iid/local/seed-{seed}".split()
        for seed in (4, 5)
    ]


def test_the_papers_cells(tmp_path):
    cells = listed("paper.sbatch", tmp_path)
    assert len(cells) == 3 * 2 * 11 * 3 == last_task("paper.sbatch") + 1
    assert len({cell[cell.index("--out") + 1] for cell in cells}) == len(cells)
    assert {cell[0] for cell in cells} == set(PAPER)
    read = 0
    for cell in cells:
        flags = dict(zip(cell[1::2], cell[2::2]))
        alpha, classes = flags.get("--alpha"), flags.get("--classes_per_client")
        if flags["--partition"] == "dirichlet":
            assert (alpha, classes) == ("0.1", None)
        else:
            assert (alpha, classes) == (None, "10" if flags["--dataset"] == "cifar100" else "2")
        known = cell[0] in strategies.names() and flags["--dataset"] in datasets.names()
        sample = cell[0] == "fedapa" or flags["--dataset"] == "fmnist"  # each takes its time
        if not (known and sample and flags["--seed"] == "2"):
            continue
        run = cli.resolve(cli.Request(cell[0], tuple(cell[1 : cell.index("--resume")]))).run
        assert (run.clients, run.rounds, run.epochs, run.batch_size) == (20, 50, 2, 64)
        assert (run.lr, run.momentum, run.model) == (0.01, 0.9, "lenet5")
        assert (run.seed, run.partition) == (int(flags["--seed"]), flags["--partition"])
        read += 1
    assert read >= 4


def test_an_array_without_slurm_runs_its_cells_one_by_one(site):
    lists = {"STRATEGIES": "fedapa local", "SEEDS": "0", "PARTITIONS": "iid"}
    rc, out = site.run("sweep.sbatch", job=None, KIND="failed", **lists)
    assert rc == 1, out
    assert [c.split()[6] for c in site.calls()] == ["fedapa", "local"]


def test_what_an_array_refuses(site):
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "18"}
    rc, out = site.run("sweep.sbatch", **array)
    assert (rc, "there is no cell 18: submit with --array=0-17" in out) == (2, True)
    rc, out = site.run("paper.sbatch", "--out", "x")
    assert (rc, "name the folder above them in RUNS" in out) == (2, True)
    assert site.calls() == []


# -- real runs -----------------------------------------------------------------------------------

SMALL = ("--clients=4", "--classes_per_client=5", "--rounds=6", "--checkpoint_every=1")
DELAY = "delay:train:0:3"  # client 0 takes its time in round 3 ...
HELD = "fault: delay"  # ... and says so at its beginning


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("references"), SMALL)


@pytest.fixture(scope="module")
def undisturbed(launch):
    return launch(None).fingerprint


def interpreter(folder, mpi="mpich", program="", first=""):
    """A stand-in for ``python`` that runs ``program`` instead of ``-m fedapa_mpi.run``.

    first: shell commands that come before.
    """
    python = f"{BIN if mpi == 'mpich' else f'{OPENMPI}/bin'}/python"
    path = folder / f"python-{mpi}"
    module = f"shift 2\nexec {python} {program}" if program else f"exec {python}"
    path.write_text(f'#!/bin/bash\n{first}\n{module} "$@"\n')
    path.chmod(0o755)
    return str(path)


def site_environment(mpi="mpich", **more):
    """What a user of a site with this MPI has set."""
    env = environment(mpi)
    for name in OPENMPI_ENV:
        if "mapping_policy" in name:  # SLURM has slots enough
            env.pop(name, None)
    venv = sys.prefix if mpi == "mpich" else OPENMPI
    path = f"{venv}/bin:{os.environ['PATH']}"
    return {**env, "VENV": venv, "PATH": path, "FEDAPA_ROOT": str(ROOT), **more}


@pytest.mark.mpi
def test_a_laptop_runs_the_script_as_it_is(tmp_path, undisturbed):
    env = site_environment(RANKS="3", PYTHON=interpreter(tmp_path, program=f"{FAULTS} {DELAY}"))
    env["FAULT_SECONDS"] = "2"
    command = ["bash", JOBS / "run.sbatch", *SMALL]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
    wait_until(lambda: HELD in (tmp_path / "log").read_text(), "round 3")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=30) == 0
    run = Ended(0, (tmp_path / "log").read_text(), "", tmp_path / "runs/fedapa")
    assert run.status["status"] == "interrupted"
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run.status["fingerprint"] == undisturbed


@pytest.fixture(scope="module")
def cluster():
    reason = slurm.missing()
    if reason:
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    with slurm.Cluster(nodes=2) as cluster:
        yield cluster


def need(mpi, launcher="mpirun"):
    """Skips what this machine has no MPI for, or fails where everything is required."""
    if mpi == "openmpi" and not OPENMPI:
        reason = "FEDAPA_OPENMPI does not name an environment with Open MPI"
    elif "pmix" in launcher and not slurm.has_pmix():
        reason = f"no {slurm.PMIX}: install libpmix2 and link libpmix.so to its libpmix.so.2"
    else:
        return
    pytest.fail(reason) if REQUIRED else pytest.skip(reason)


class Job:
    """A submitted job script with three ranks, and its log."""

    def __init__(self, cluster, folder, script, *args, sbatch=(), log="%j", **env):
        self.cluster, self.folder = cluster, folder
        options = [f"--output={folder}/{log}.log", "--ntasks=3", *sbatch]
        self.id = cluster.submit(*options, str(JOBS / script), *args, cwd=folder, env=env)

    def log(self, task=None):
        name = self.id if task is None else f"{self.id}_{task}"
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, text, task=None, timeout=90):
        """Waits for a text in the log."""
        wait_until(lambda: text in self.log(task), f"{text!r} in {self.log(task)!r}", timeout)

    def usr1(self, task=None):
        """What SLURM does some minutes before the time limit."""
        name = self.id if task is None else f"{self.id}_{task}"
        self.cluster.command("scancel", "--signal=USR1", "--batch", name)

    def ended(self, state, restarts=0, task=None):
        """Waits for the end; the facts have to be these."""
        name = self.id if task is None else f"{self.id}_{task}"
        facts = self.cluster.wait(name)
        found = facts["JobState"], int(facts["Restarts"])
        assert found == (state, restarts), f"{facts}\n{self.log(task)}"
        return facts

    def run(self, folder="runs/fedapa"):
        return Ended(0, self.log(), "", self.folder / folder)


def slow(folder, mpi="mpich", seconds=3, **more):
    """The environment of a run whose third round takes some seconds."""
    python = interpreter(folder, mpi, program=f"{FAULTS} {DELAY}")
    return site_environment(mpi, PYTHON=python, FAULT_SECONDS=str(seconds), **more)


@pytest.mark.mpi
def test_slurm_runs_21_ranks_to_the_end(cluster, tmp_path):
    """As submitted from the clone: nothing is set but the environment and the folder."""
    env = site_environment()
    del env["FEDAPA_ROOT"]
    job = cluster.submit(
        f"--output={tmp_path}/%x-%j.log",
        "jobs/run.sbatch",
        *("fedapa", "--rounds=3", "--out", str(tmp_path / "run")),
        cwd=ROOT,
        env=env,
    )
    facts = cluster.wait(job)
    log = (tmp_path / f"fedapa-{job}.log").read_text()
    assert (facts["JobState"], facts["NumTasks"]) == ("COMPLETED", "21"), log
    run = Ended(0, log, "", tmp_path / "run")
    assert (run.status["status"], run.status["job_id"]) == ("finished", job)
    assert run.status["fingerprint"] in log
    with run.results() as results:
        assert results["seconds/compute"].shape == (3, 21)
        assert set(results["trained_by/rank"][:].ravel()) >= set(range(1, 21))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("mpi", "launcher"),
    [
        ("mpich", "mpirun"),
        ("openmpi", "mpirun"),
        ("mpich", "srun --mpi=pmi2"),
        ("openmpi", "srun --mpi=pmix"),
    ],
)
def test_slurm_usr1_ends_in_a_requeued_and_finished_run(
    cluster, tmp_path, undisturbed, mpi, launcher
):
    need(mpi, launcher)
    job = Job(cluster, tmp_path, "run.sbatch", *SMALL, **slow(tmp_path, mpi), LAUNCHER=launcher)
    job.until(HELD)
    began = time.monotonic()
    job.usr1()
    job.until("round 4/6")
    print(f"{mpi} {launcher}: {time.monotonic() - began:.1f} s from the signal to the next round")
    job.ended("COMPLETED", restarts=1)
    log = job.log()
    assert log.count("USR1: USR1 to the launcher") == 1
    assert log.count("interrupted by SIGUSR1 after round 3 of 6") == 1
    assert log.count("round 3/6") == 1, "appended, and not trained twice"
    assert f"requeued: job {job.id} goes on" in log
    status = job.run().status
    assert (status["fingerprint"], status["restart_count"]) == (undisturbed, 1)


@pytest.mark.mpi
def test_slurm_usr1_before_the_run_has_begun(cluster, tmp_path, undisturbed):
    """The ranks of the first start do not listen and are ended; the second start does it all."""
    first = '[ -n "$SLURM_RESTART_COUNT" ] || { echo asleep; sleep 60; }'
    env = site_environment(PYTHON=interpreter(tmp_path, first=first))
    job = Job(cluster, tmp_path, "run.sbatch", *SMALL, **env)
    job.until("asleep")
    job.usr1()
    job.ended("COMPLETED", restarts=1)
    assert "USR1 before the run has begun" in job.log()
    assert job.run().status["fingerprint"] == undisturbed


@pytest.mark.mpi
def test_scontrol_requeue_loses_nothing(cluster, tmp_path, undisturbed):
    job = Job(cluster, tmp_path, "run.sbatch", *SMALL, **slow(tmp_path))
    job.until(HELD)
    cluster.command("scontrol", "requeue", job.id)
    job.ended("COMPLETED", restarts=1)
    assert job.log().count("round 3/6") == 1
    assert "TERM: USR1 to the launcher" in job.log()
    assert job.run().status["fingerprint"] == undisturbed


@pytest.mark.mpi
def test_scancel_is_obeyed_and_the_run_goes_on_by_hand(cluster, tmp_path, undisturbed):
    job = Job(cluster, tmp_path, "run.sbatch", *SMALL, **slow(tmp_path))
    job.until(HELD)
    cluster.command("scancel", job.id)
    job.ended("CANCELLED")
    wait_until(lambda: "not requeued from here" in job.log(), "the end of the script")
    status = job.run().status
    assert (status["status"], status["round"]) == ("interrupted", 3)
    again = Job(cluster, tmp_path, "run.sbatch", *SMALL, **slow(tmp_path))
    again.ended("COMPLETED")
    assert again.run().status["fingerprint"] == undisturbed


@pytest.mark.mpi
def test_tasks_of_an_array_are_requeued_alone(cluster, tmp_path, undisturbed):
    env = slow(tmp_path, seconds=4, STRATEGIES="fedapa local", SEEDS="0", PARTITIONS="pathological")
    job = Job(cluster, tmp_path, "sweep.sbatch", *SMALL, sbatch=["--array=0-1"], log="%A_%a", **env)
    job.until(HELD, task=0)
    job.usr1(task=0)
    job.ended("COMPLETED", restarts=1, task=0)
    job.ended("COMPLETED", restarts=0, task=1)
    runs = [job.run(f"runs/sweep/pathological/{name}/seed-0") for name in ("fedapa", "local")]
    assert [run.status["status"] for run in runs] == ["finished", "finished"]
    assert runs[0].status["fingerprint"] == undisturbed
    assert runs[0].status["job_id"] == f"{job.id}_0"


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_two_nodes_with_their_own_gpus(cluster, tmp_path, undisturbed, mpi):
    need(mpi)
    shape = ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--gpus-per-node=2"]
    small = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    python = interpreter(tmp_path, mpi, program=str(ROOT / "tests/gpus.py"))
    env = site_environment(mpi)
    shown = Job(
        cluster,
        tmp_path,
        *("multinode.sbatch", *SMALL, "--dry-run"),
        sbatch=shape,
        **env | {"PYTHON": python},
    )
    job = Job(cluster, tmp_path, "multinode.sbatch", *SMALL, sbatch=small, **env)
    shown.ended("COMPLETED")
    log = shown.log()
    first, second = cluster.nodes
    where = dict(re.findall(r"rank=(\d+) node=(\S+) ", log))
    assert where == {"0": first, "1": first, "2": first, "3": second, "4": second}, log
    assert set(re.findall(r"visible=(\S*)", log)) == {"0,1"}
    # rank, host, clients, device: each node counts its devices from 0
    table = re.findall(r"^ +(\d) +\S+ +(server|client \d) +(\S+) *$", log, re.MULTILINE)
    assert [(rank, device) for rank, _, device in table] == [
        ("0", "cpu"),
        ("1", "cuda:0"),
        ("2", "cuda:1"),
        ("3", "cuda:0"),
        ("4", "cuda:1"),
    ], log
    job.ended("COMPLETED")
    assert job.run("runs/multinode").status["fingerprint"] == undisturbed


@pytest.mark.mpi
def test_two_cells_of_the_paper(cluster, tmp_path):
    """On small data: flags after the script's name win over the protocol."""
    small = ("--dataset=digits", "--model=mlp", "--rounds=2")
    env = site_environment(METHODS="fedapa fedavg", SEEDS="1", DATASETS="fmnist")
    job = Job(cluster, tmp_path, "paper.sbatch", *small, sbatch=["--array=0,3"], log="%A_%a", **env)
    for task, folder in ((0, "pathological/fedapa"), (3, "dirichlet/fedavg")):
        job.ended("COMPLETED", task=task)
        with job.run(f"runs/paper/fmnist/{folder}/seed-1").results() as results:
            assert results.attrs["status"] == "finished"
            assert results["accuracy/post/client"].shape == (2, 20)


@pytest.mark.mpi
def test_what_cannot_run_is_said_once_and_not_requeued(cluster, tmp_path):
    alone = Job(
        cluster, tmp_path, "run.sbatch", *SMALL, **site_environment(LAUNCHER="srun --mpi=none")
    )
    flag = Job(cluster, tmp_path, "run.sbatch", "--no_such_flag=1", **site_environment())
    for job, message in ((alone, "under srun use --mpi=pmi2"), (flag, "no_such_flag")):
        job.ended("FAILED")
        errors = [line for line in job.log().splitlines() if "fedapa-mpi: error:" in line]
        assert len(errors) == 1, job.log()
        assert message in errors[0]
        assert "requeued" not in job.log()
    assert not (tmp_path / "runs").exists()


@pytest.mark.mpi
def test_a_run_that_never_gets_anywhere_stops_being_requeued(cluster, tmp_path):
    job = Job(
        cluster,
        tmp_path,
        *("run.sbatch", *SMALL, "--max_time=0.001"),
        **site_environment(MAX_RESTARTS="1"),
    )
    facts = job.ended("FAILED", restarts=1)
    assert facts["ExitCode"] == "1:0"
    assert "error: restarted 1 times and still not finished" in job.log()
    assert job.run().status["status"] == "interrupted"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_time_limit(cluster, tmp_path, undisturbed):
    """Two minutes; the signal comes a minute before, within the 30 s that SLURM allows itself."""
    job = Job(
        cluster,
        tmp_path,
        *("run.sbatch", *SMALL),
        sbatch=["--time=2", "--signal=B:USR1@60"],
        **slow(tmp_path, seconds=75),
    )
    facts = job.cluster.wait(job.id, timeout=400)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert job.run().status["fingerprint"] == undisturbed

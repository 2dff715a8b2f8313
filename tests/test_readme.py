"""The README does what it says: its commands and snippets are run as they stand, but shorter.

What is changed before a command runs:

* ``SHORTER``: fewer ranks, rounds, seeds and seconds;
* a new run that names no number of rounds gets ``--rounds 2``;
* the Fashion-MNIST line is left out on a machine that has no copy of the data.

The two lines that make an environment are compared with the CI script instead of run, and what
needs a cluster is only read by ``bash -n``.
"""

import configparser
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from fedapa_mpi import config, strategies
from fedapa_mpi.data import datasets, partition
from fedapa_mpi.data.datasets import FASHION_MNIST

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SECTIONS = {
    part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"(?m)^## ", README)[1:]
}
LINES = SECTIONS["The two lines"]
SHORTER = {
    r"mpirun -n \d+": "mpirun -n 3",
    r"--rounds 20\b": "--rounds 2",
    r"--rounds 500\b": "--rounds 5",
    r"--rounds 600\b": "--rounds 6",
    r"--max-time 10\b": "--max-time 0.3",
    r"--seeds 0,1,2\b": "--seeds 0",
    r"timeout --signal=USR1 20\b": "timeout --signal=USR1 6",
}
CLUSTER = re.compile(
    r"module load|#SBATCH|cifar|rsync|"
    r"(?m:^(LIST=1 .*|STRATEGIES=.*)?(sbatch|squeue|scancel|bash jobs/))"
)
OPENMPI = {  # in case the environment's MPI is Open MPI: as root, and more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def fences(section: str, language: str) -> list[str]:
    """The blocks of code of one section."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", SECTIONS[section])


def shortened(script: str) -> str:
    """The script as it is run here."""
    for pattern, replacement in SHORTER.items():
        script = re.sub(pattern, replacement, script)
    have_fmnist = FASHION_MNIST.system.is_dir() or "FEDAPA_DATA" in os.environ
    lines = []
    for line in script.splitlines():
        starts = re.search(r"fedapa_mpi\.(run|sweep) .*--out", line)
        if starts and "--resume" not in line and "--rounds" not in line:
            line += " --rounds 2"
        if have_fmnist or "--dataset fmnist" not in line:
            lines.append(line)
    return "\n".join(lines)


def execute(command: list[str], script: str, folder: Path, package: Path = ROOT) -> str:
    """Feeds a script to a command in a folder; its standard output."""
    environment = {
        **os.environ,
        **OPENMPI,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(package),
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [*command, script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shell(section: str, folder: Path, package: Path = ROOT) -> str:
    """Runs all shell commands of a section; their output."""
    scripts = [s for s in fences(section, "bash") if not CLUSTER.search(s)]
    assert scripts
    command = ["bash", "-euo", "pipefail", "-c"]
    return "".join(execute(command, shortened(script), folder, package) for script in scripts)


def python(section: str, folder: Path) -> list[str]:
    """Runs every snippet of a section; the output of each."""
    return [execute([sys.executable, "-c"], s, folder) for s in fences(section, "python")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the run ``runs/demo``, which later sections read."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "output").write_text(shell("Run something else", folder))
    return folder


# ---------------------------------------------------------------------------- without a run


def test_the_two_lines_make_the_environment_and_run_job_and_tests():
    job, tests = fences("The two lines", "bash")
    extras = configparser.ConfigParser(interpolation=None)
    extras.read(ROOT / "setup.cfg")
    for line, names in ((job, "mpich"), (tests, "mpich,test")):
        assert line.count("\n") == 1, "must paste as one line"
        new, activate, install, *_ = line.split(" && ")
        assert new == "test -x .venv/bin/pip || python3 -m venv .venv"
        assert activate == ". .venv/bin/activate"
        assert install == f"pip install -e '.[{names}]'"
        assert set(names.split(",")) <= set(extras["options.extras_require"])
    assert job.endswith("&& mpirun -n 21 python -m fedapa_mpi.run\n")
    assert tests.endswith("&& pytest\n")


def test_the_two_lines_are_what_ci_does():
    script = (ROOT / ".ci" / "run").read_text()
    assert '`pytest -m "not slow"`' in LINES
    assert '/pytest" -m "not slow"' in script
    assert "-e '.[mpich,dev]'" in script, "dev holds test, see setup.cfg"
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    assert "%(test)s" in setup["options.extras_require"]["dev"]


@pytest.mark.parametrize("section", SECTIONS)
def test_shell_parses(section):
    for script in fences(section, "bash"):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_only_cluster_and_set_up_commands_are_not_run():
    tested = {
        "Run something else",
        "Resume",
        "Compare methods",
        "On a cluster",
        "Stop, and fail",
        "Add a method",
        "Own model, own data",
        "Which numbers are reproducible",
    }
    assert {name for name in SECTIONS if fences(name, "bash")} == tested | {"The two lines"}
    assert {name for name in SECTIONS if fences(name, "python")} <= tested | {"Read the results"}


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_table_of_flags_is_complete():
    fields = [f.name for f in dataclasses.fields(config.RunConfig)]
    fields += [f.name for f in dataclasses.fields(strategies.config_class("fedapa"))]
    rows = re.findall(r"(?m)^\| `(--[^`]+)` \|", SECTIONS["Run something else"])
    named = [flag.removeprefix("--") for row in rows for flag in row.split()]
    assert sorted(named) == sorted([*fields, "resume"])


# ---------------------------------------------------------------------------- with runs


@pytest.mark.mpi
def test_run_something_else(work):
    output = (work / "output").read_text()
    assert "--classes_per_client" in output
    assert output.count("fingerprint: ") == 2
    assert (work / "runs/demo/results.h5").exists()
    assert (work / "runs/centred/results.h5").exists()


@pytest.mark.mpi
def test_read_the_results(work):
    recovery, _, names, _ = python("Read the results", work)
    assert re.fullmatch(r"own 0\.\d+, same 0\.\d+, others 0\.\d+\n", recovery)
    assert (work / "A.png").stat().st_size > 1000
    assert names.startswith("(20, 20) extractor.")


@pytest.mark.mpi
def test_the_tables_of_datasets_and_attributes_are_complete(work):
    text = SECTIONS["Read the results"]
    documented = set()
    for cell in re.findall(r"(?m)^\| (`.*?`) \|", text):
        for name in re.findall(r"`([^`]+)`", cell):
            documented |= expanded(name)
    with h5py.File(work / "runs/demo/results.h5") as results:
        found = set()
        results.visititems(lambda n, o: found.add(n) if isinstance(o, h5py.Dataset) else None)
        assert documented == found
        attributes = text[text.index("Attributes:") :].partition("\n\n")[0]
        assert set(re.findall(r"`(\w+)`", attributes)) == set(results.attrs)


@pytest.mark.mpi
def test_resume(tmp_path):
    output = shell("Resume", tmp_path)
    assert "runs/long is finished: 6 rounds are done" in output
    with h5py.File(tmp_path / "runs/long/results.h5") as results:
        assert results["round"][:].tolist() == list(range(1, 7))


@pytest.mark.mpi
def test_stop_and_fail(tmp_path):
    output = shell("Stop, and fail", tmp_path)
    status = json.loads((tmp_path / "runs/stopped/status.json").read_text())
    assert status["status"] == "interrupted"
    assert status["reason"] == "SIGUSR1"
    assert '"reason": "SIGUSR1"' in output
    text = SECTIONS["Stop, and fail"]
    fields = text[text.index("Its fields:") :].partition(". One run")[0]
    assert set(status) <= set(re.findall(r"`(\w+)`", fields))


@pytest.mark.mpi
def test_which_numbers_are_reproducible(tmp_path):
    alone, together = shell("Which numbers are reproducible", tmp_path).splitlines()
    assert alone.startswith("fingerprint: ")
    assert alone == together


@pytest.mark.mpi
def test_compare_methods(tmp_path):
    output = shell("Compare methods", tmp_path)
    (shown,) = fences("Compare methods", "text")
    for line in shown.splitlines():
        assert line.split("  ")[0] in output, "a method of the table shown"
    (printed,) = python("Compare methods", tmp_path)
    assert len(re.findall(r"(?m)^recv 0\.\d{4}  post 0\.\d{4}  \S+-seed0$", printed)) == 4


def test_add_a_method(tmp_path):
    shutil.copytree(ROOT / "fedapa_mpi", tmp_path / "fedapa_mpi")
    (source,) = fences("Add a method", "python")
    path = source.partition("\n")[0].removeprefix("# ")
    (tmp_path / path).write_text(source)
    output = shell("Add a method", tmp_path, tmp_path)
    assert "fingerprint: " in output
    # P = 64 * 64 + 64 + 64 * 32 + 32 parameters of 4 bytes: the head stayed at home
    (results,) = tmp_path.glob("runs/*/results.h5")
    with h5py.File(results) as file:
        assert set(file["bytes/up"][:].ravel()) == {0, 4 * 6240}


def test_own_model(tmp_path):
    (source,) = fences("Own model, own data", "python")
    (tmp_path / source.partition("\n")[0].removeprefix("# ")).write_text(source)
    assert "fingerprint: " in shell("Own model, own data", tmp_path)


def test_the_methods_data_sets_partitions_and_models_are_all_named():
    methods = re.findall(r"(?m)^\| `(\w+)` \| [a-z, ]+ \|", SECTIONS["Run something else"])
    assert sorted(methods) == strategies.names()
    named = re.findall(r"`([\w-]+)`", SECTIONS["Own model, own data"])
    assert {*datasets.names(), *partition.names(), *config.MODELS} <= set(named)


def expanded(name: str) -> set[str]:
    """``a/{b,c}`` as ``a/b`` and ``a/c``."""
    match = re.search(r"\{([^}]+)\}", name)
    if match is None:
        return {name}
    choices = match[1].split(",")
    return set().union(*(expanded(name.replace(match[0], choice, 1)) for choice in choices))

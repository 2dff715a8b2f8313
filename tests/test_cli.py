"""The command line: what is understood, what is refused, and what it costs."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from launching import Launcher, environment
from tiny import simulate

from fedapa_mpi import __version__, cli, start
from fedapa_mpi.strategies import names


def asked(*argv):
    """The configuration that a command line means, flat."""
    return cli.resolve(cli.read(argv)).flat()


def printed(*argv):
    """What --print_config answers."""
    with pytest.raises(cli.Finished) as answer:
        cli.read([*argv, "--print_config"])
    return answer.value.text


@pytest.fixture
def file(tmp_path):
    """Writes a --config file and gives its path."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


# -- what is understood ----------------------------------------------------------------------------


def test_no_arguments():
    assert asked() == asked("fedapa")
    assert asked()["strategy"] == "fedapa"
    assert asked()["rounds"] == 60


@pytest.mark.parametrize("name", names())
def test_the_first_word_names_the_strategy(name):
    assert asked(name)["strategy"] == name
    assert asked(name, "--lr", "0.5")["lr"] == 0.5


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch_size", "7", "--server_momentum", "0.5"),
        ("--batch-size", "7", "--server-momentum", "0.5"),
        ("--batch-size=7", "--server_momentum=0.5"),
    ],
)
def test_hyphens_and_underscores_mean_the_same(flags):
    found = asked(*flags)
    assert (found["batch_size"], found["server_momentum"]) == (7, 0.5)


def test_hyphens_in_values_stay():
    assert asked("--out", "my-run")["out"] == asked("--out=my-run")["out"] == "my-run"


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--adapt", "false"), "adapt", False),
        (("--adapt=true",), "adapt", True),
        (("--lr", "1e-3"), "lr", 0.001),
        (("--seed", "5", "--seed", "6"), "seed", 6),
        (("--drop_last", "true"), "drop_last", "true"),
        (("--checkpoint_every", "5"), "checkpoint_every", "5"),
        (("--max_time", "1:30"), "max_time", "1:30"),
        (("--max_time", "90"), "max_time", "90"),
        (("--grace", "3"), "grace", 3.0),
        (("--out", "7"), "out", "7"),
    ],
)
def test_values(flags, field, value):
    found = asked(*flags)[field]
    assert found == value
    assert type(found) is type(value)


def test_commands_are_read_before_the_rest():
    request = cli.read(["fedavg", "--resume", "runs/a", "--out", "b", "--out=runs/a", "--dry-run"])
    assert (request.strategy, request.resume, request.out) == ("fedavg", "runs/a", "runs/a")
    assert request.dry_run
    assert cli.read([]).resume is None
    assert not cli.read([]).dry_run


def test_flags_of_a_resumed_run_wait_for_its_stored_strategy():
    stored = asked("fedapa", "--eta", "0.5", "--dataset", "fmnist")
    request = cli.read(["--resume", "runs/a", "--gradient", "centred", "--rounds", "90"])
    found = cli.resolve(request, stored).flat()
    assert found == {**stored, "gradient": "centred", "rounds": 90}
    with pytest.raises(ValueError, match=r"--gradient"):
        cli.resolve(request, asked("fedavg"))


# -- files -----------------------------------------------------------------------------------------


def test_a_file_is_overruled_by_flags(file):
    path = file("lr: 0.2\nbatch-size: 7\neta: 1e-3\n")
    found = asked("--config", path, "--lr", "0.3")
    assert (found["lr"], found["batch_size"], found["eta"]) == (0.3, 7, 0.001)
    assert asked(f"--config={path}")["lr"] == 0.2


def test_a_file_may_name_the_strategy(file):
    path = file("strategy: fedavg\nlr: 0.2\n")
    assert asked("--config", path)["strategy"] == "fedavg"
    assert asked("local", "--config", path)["strategy"] == "local"  # the first word wins


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("max_time: 1:30", "max_time", "1:30"),  # 90 for YAML 1.1
        ("max_time: 90", "max_time", "90"),
        ("checkpoint_every: 5", "checkpoint_every", "5"),
        ("drop_last: true", "drop_last", "true"),
        ("drop_last: 'true'", "drop_last", "true"),
        ("adapt: false", "adapt", False),
        ("grace: null", "grace", None),
        ("out: null", "out", None),
        ("lr: 1e-3", "lr", 0.001),  # text for YAML 1.1
    ],
)
def test_a_value_means_the_same_in_a_file(file, text, field, value):
    assert asked("--config", file(text))[field] == value


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("fedavg",),
        ("local", "--partition", "iid"),
        ("fedapa", "--preset", "official"),
        ("fedapa", "--adapt", "false", "--initial_A", "uniform"),
        ("fedapa", "--dataset", "fmnist", "--data_dir", "x", "--partition", "dirichlet"),
        ("fedavg", "--max_time", "1:30", "--checkpoint_every", "5", "--drop_last", "true"),
        ("fedapa", "--grace", "3", "--out", "runs/a"),
    ],
)
def test_what_print_config_says_is_accepted_back(file, argv):
    text = printed(*argv)
    path = file(text)
    assert yaml.safe_load(text) == asked(*argv)
    assert printed("--config", path) == text
    assert printed(*argv[:1], "--config", path) == text
    assert printed(*argv, "--config", path) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnds: 3", r"--rnds"),
        ("lr: fast", r"lr"),
        ("lr: [1, 2]", r"holds other than 'flag: value' lines"),
        ("- lr", r"holds other than 'flag: value' lines"),
        ("", r"holds other than 'flag: value' lines"),
        ("lr: [1", r"cannot be read"),
        ("dry_run: true", r"holds dry_run, which belongs on the command line"),
        ("resume: auto", r"holds resume, which belongs on the command line"),
        ("strategy: fedxyz", r"strategy is 'fedxyz', expected one of"),
        ("alpha: 0.5", r"alpha has no effect with partition=pathological"),
    ],
)
def test_files_that_are_refused(file, text, message):
    with pytest.raises(ValueError, match=message):
        cli.read(["--config", file(text)])


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"--config none\.yaml cannot be read: .*No such file"):
        cli.read(["--config", "none.yaml"])


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fedxyz"], r"strategy is 'fedxyz', expected one of .*fedapa, .*fedavg, .*local"),
        (["fedxyz", "--help"], r"strategy is 'fedxyz'"),
        (["--lrr", "0.1"], r"--lrr"),
        (["--round", "3"], r"--round\b"),  # no abbreviations
        (["--batch", "3"], r"--batch\b"),
        (["fedavg", "--eta", "0.1"], r"--eta"),  # another strategy's
        (["fedavg", "--gradient=centred"], r"--gradient"),
        (["--rounds", "3", "fedavg"], r"fedavg"),  # the strategy comes first
        (["fedapa", "fedavg"], r"fedavg"),
        (["--lr", "fast"], r"lr.*float.*fast"),
        (["--seed", "1.5"], r"seed.*int.*1\.5"),
        (["--lr"], r"--lr.*expected one argument"),
        (["--adapt", "maybe"], r"adapt.*bool.*maybe"),
        (["--adapt"], r"--adapt.*expected one argument"),
        (["--gradient", "up"], r"gradient.*descent.*printed.*centred.*up"),
        (["--dry_run", "true"], r"true"),
        (["--out"], r"--out needs a value"),
        (["--resume", "--lr", "1"], r"--resume needs a value"),
        (["--config"], r"--config needs a value"),
        (["--eta", "-1"], r"eta is -1\.0, expected"),
        (["--clients", "0"], r"clients is 0, expected at least 1"),
        (["fedavg", "--order", "sequential"], r"order is sequential, but fedavg knows only paral"),
        (["--alpha", "0.1"], r"alpha has no effect with partition=pathological: it needs"),
        (["--partition", "iid", "--assignment", "block"], r"assignment has no effect"),
        (["--adapt", "false", "--eta", "0.01"], r"eta has no effect with adapt=False"),
        (["--data_dir", "x"], r"data_dir has no effect with dataset=digits: it needs .*fmnist"),
        (["--row_isolated", "false"], r"row_isolated=false has no effect without"),
    ],
)
def test_refusals(argv, message):
    with pytest.raises(ValueError, match=message) as error:
        cli.read(argv)
    assert "\n" not in str(error.value)


def test_a_flag_without_effect_is_refused_even_at_its_default(file):
    with pytest.raises(ValueError, match="alpha"):
        cli.read(["--alpha", "0.1"])
    assert cli.read(["--config", file("alpha: 0.1")])  # but not in a file, which may hold all


# -- help ------------------------------------------------------------------------------------------


def test_help_and_version():
    with pytest.raises(cli.Finished) as answer:
        cli.read(["fedavg", "--help"])
    assert "--batch_size" in answer.value.text
    assert "--eta" not in answer.value.text
    with pytest.raises(cli.Finished) as answer:
        cli.read(["-h"])
    assert "--eta" in answer.value.text
    with pytest.raises(cli.Finished, match=__version__):
        cli.read(["--version"])


# -- as a process ----------------------------------------------------------------------------------

SCRIPT = """
import contextlib, io, json, os, resource, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mpi4py", "torch", "torchvision", "sklearn", "matplotlib"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocker())
from fedapa_mpi.run import main

answers = {}
for rank, line in json.loads(sys.argv[1]):
    os.environ["PMI_RANK"] = str(rank)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rc = main(line.split())
    answers[f"{rank} {line}"] = [rc, out.getvalue(), err.getvalue()]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([answers, usage.ru_utime + usage.ru_stime]))
"""

GOOD = ["--help", "fedavg --help", "--version", "--print_config", "local --print_config"]
WRONG = ["--lr fast", "fedxyz", "--round 3", "fedavg --eta 1", "--alpha 1", "--config none.yaml"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What ranks 0 and 3 say where neither MPI nor torch can be imported, and the CPU seconds."""
    lines = [(rank, line) for rank in (0, 3) for line in GOOD + WRONG]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(lines)],
        cwd=tmp_path_factory.mktemp("cli"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found, seconds = json.loads(done.stdout)
    return SimpleNamespace(of=found, seconds=seconds)


def test_answers_need_neither_mpi_nor_torch(answers):
    for line in GOOD:
        rc, out, err = answers.of[f"0 {line}"]
        assert (rc, err) == (0, ""), line
        assert len(out) > 10
    assert answers.of["0 --version"][1] == f"fedapa-mpi {__version__}\n"
    assert answers.seconds < 4  # for all lines together; torch alone takes longer to import


def test_errors_are_said_in_one_line_with_status_2(answers):
    for line in WRONG:
        rc, out, err = answers.of[f"0 {line}"]
        assert (rc, out) == (2, ""), line
        assert err.startswith("fedapa-mpi: error: ")
        assert err.count("\n") == 1


def test_other_ranks_are_silent_and_exit_0(answers):
    for line in GOOD + WRONG:
        assert answers.of[f"3 {line}"] == [0, "", ""], line


def test_run_imports_only_the_standard_library_at_first():
    script = """
import sys
before = set(sys.modules)
import fedapa_mpi.run
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "['fedapa_mpi']"


# -- a whole run, as the README's first line starts it ---------------------------------------------


def test_a_run_in_one_process(tmp_path):
    done = Launcher(tmp_path)(None, "--rounds=2", "--clients=5")
    assert done.rc == 0, done.err
    lines = done.out.splitlines()
    assert sum(line.startswith("round ") for line in lines) == 2
    assert lines[-1] == f"fingerprint: {done.fingerprint}"
    assert done.status["status"] == "finished"
    assert done.status["fingerprint"] == done.fingerprint
    with done.results() as h5:
        assert h5.attrs["fingerprint"] == done.fingerprint
        assert json.loads(h5.attrs["config"])["strategy"] == "fedapa"
        assert h5["A"].shape == (2, 5, 5)


# -- what is to be started or continued ------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A finished run of two rounds."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    return str(simulate(folder, ["fedapa", "--rounds", "2", "--eta", "0.5"]).folder)


def settle(*argv):
    return start.settle(cli.read(argv))


def test_a_new_run_gets_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = settle("fedavg")
    assert re.fullmatch(r"runs/fedavg-digits-\d{8}-\d{6}", str(first.folder.path))
    assert first.checkpoint is None
    assert list(tmp_path.iterdir()) == []  # nothing is created yet
    monkeypatch.setattr(start.time, "strftime", lambda form: "now")
    (tmp_path / "runs" / "fedavg-digits-now").mkdir(parents=True)
    assert str(settle("fedavg").folder.path) == "runs/fedavg-digits-now-2"


def test_resuming_takes_the_stored_values(stored):
    found = settle("--resume", stored, "--rounds", "3", "--keep", "5", "--max-time", "9")
    assert found.experiment.method.eta == 0.5
    assert (found.experiment.run.rounds, found.experiment.run.keep) == (3, 5)
    assert found.checkpoint.name == "round-000002.h5"
    assert not found.over
    assert settle("--resume", stored, "--eta", "0.5", "--seed", "0").over
    assert settle("fedapa", "--out", stored, "--resume", "auto").over


def test_resume_auto_starts_where_there_is_nothing(tmp_path):
    found = settle("--out", str(tmp_path / "new"), "--resume", "auto", "--eta", "0.25")
    assert found.checkpoint is None
    assert found.experiment.method.eta == 0.25


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "STORED"], r"STORED"),  # a used folder, without --resume
        (["--resume", "auto"], r"--resume auto needs --out DIR"),
        (["--resume", "NOWHERE"], r"no complete checkpoint in NOWHERE.*--resume auto"),
        (["--resume", "STORED", "--out", "x"], r"--out x cannot be used"),
        (["--resume", "STORED", "--eta", "0.1"], r"eta: stored 0\.5, asked 0\.1.*another --out"),
        (["--resume", "STORED", "--threads", "2"], r"threads: stored 1, asked 2"),
        (["--resume", "STORED", "--clients", "5", "--lr", "1"], r"clients: .*; lr: stored 0\.05"),
        (["--resume", "STORED", "--rounds", "1"], r"rounds: stored 2, asked 1 \(only up\)"),
        (["fedavg", "--resume", "STORED"], r"strategy: stored 'fedapa', asked 'fedavg'"),
        (["--resume", "STORED", "--lrr", "1"], r"--lrr"),
    ],
)
def test_requests_that_cannot_be_carried_out(stored, tmp_path, argv, message):
    places = {"STORED": stored, "NOWHERE": str(tmp_path / "nowhere")}
    for word, place in places.items():
        argv = [place if a == word else a for a in argv]
        message = message.replace(word, re.escape(place))
    with pytest.raises(ValueError, match=message):
        settle(*argv)

"""A user's own model: the rule by which it is split, what is refused, and whole runs with it."""

import subprocess
import sys

import pytest
import torch
from launching import Launcher, environment, mpirun
from tiny import same, simulate

from fedapa_mpi import models
from fedapa_mpi.data.federation import Shard

HEADER = "import torch\nfrom torch import nn\n"
CONVERTIBLE = {
    "split": """
        from fedapa_mpi.models import SplitModel

        def make(input_shape, classes):
            return SplitModel(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, classes))
    """,
    "attributes": """
        class make(nn.Module):
            def __init__(self, input_shape, classes):
                super().__init__()
                self.extractor = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
                self.head = nn.Linear(5, classes)

            def forward(self, x):
                return self.head(self.extractor(x))
    """,
    "no forward": """
        def make(input_shape, classes, width=5):
            model = nn.Module()
            model.extractor = nn.Sequential(nn.Linear(4, width), nn.ReLU())
            model.head = nn.Linear(width, classes)
            return model
    """,
    "sequential": """
        def make(shape, C):
            return nn.Sequential(nn.Linear(shape[0], 5), nn.ReLU(), nn.Linear(5, C))
    """,
}
# what is wrong -> (the module, what the error says)
REFUSED = {
    "no such attribute": (
        "def other(s, c): ...",
        r"nets .*nets.py\) has no 'make'",
    ),
    "not callable": ("make = 3", r"make is a int, which cannot be called"),
    "no arguments": ("def make(): ...", r"factory\(input_shape, classes\): too many positional"),
    "returns nothing": ("def make(s, c): ...", r"returned a NoneType, expected a torch.nn.Module"),
    "says no": (
        "def make(s, c): raise ValueError('too wide')",
        r"model nets:make for inputs \[4\]: too wide \(.*nets.py, line 3\)",
    ),
    "needs what is missing": ("import nowhere", r"nets cannot be imported \(No module .*nowhere"),
    "one module": ("def make(s, c): return nn.Linear(4, c)", r"Linear without extractor and head"),
    "short sequential": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, c))",
        r"a Sequential of length 1: expected",
    ),
    "no head": (
        "class make(nn.Module):\n"
        " def __init__(self, s, c):\n"
        "  super().__init__()\n"
        "  self.extractor = nn.Linear(4, c)\n",
        r"returned a make without head: expected",
    ),
    "head is a function": (
        "class make(nn.Module):\n"
        " def __init__(self, s, c):\n"
        "  super().__init__()\n"
        "  self.extractor = nn.Linear(4, c)\n"
        " def head(self, z): return z\n",
        r"whose head is a method: expected",
    ),
    "empty extractor": (
        "def make(s, c): return nn.Sequential(nn.Flatten(), nn.Linear(4, c))",
        r"the extractor, a Sequential, has no parameters",
    ),
    "ends with softmax": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, c), nn.Softmax(dim=1))",
        r"the head, a Softmax, has no parameters",
    ),
    "lazy": (
        "def make(s, c): return nn.Sequential(nn.LazyLinear(5), nn.Linear(5, c))",
        r"0.weight has no size yet: use a layer that is not lazy",
    ),
    "tied": (
        "def make(s, c):\n"
        " layers = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        " layers[1].weight = layers[0].weight\n"
        " return nn.Sequential(*layers)\n",
        r"0.weight is in the extractor and in the head",
    ),
    "parameter outside": (
        "def make(s, c):\n"
        " model = nn.Module()\n"
        " model.extractor, model.head = nn.Linear(4, 5), nn.Linear(5, c)\n"
        " model.scale = nn.Parameter(torch.ones(1))\n"
        " return model\n",
        r"scale is neither in the extractor nor in the head",
    ),
    "another width": (
        "def make(s, c): return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, c))",
        r"extractor fails on a float32 batch \[2, 4\]: RuntimeError: .* cannot be multiplied",
    ),
    "another width of features": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, 5), nn.Linear(6, c))",
        r"head fails on a float32 batch \[2, 5\]",
    ),
    "features not flat": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), "
        "nn.Linear(3, c))",
        r"makes \[2, 2, 3\] of a batch \[2, 4\], expected features \[2, D\]",
    ),
    "a tuple": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, 5), nn.GRU(5, 5), nn.Linear(5, c))",
        r"the extractor returns a tuple, expected a tensor",
    ),
    "classes of its own": (
        "def make(s, c): return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 7))",
        r"output for a batch \[2, 4\] is \[2, 7\], expected \[2, 3\]: one score per class",
    ),
    "more in forward": (
        "class make(nn.Module):\n"
        " def __init__(self, s, c):\n"
        "  super().__init__()\n"
        "  self.extractor, self.head = nn.Linear(4, 5), nn.Linear(5, c)\n"
        " def forward(self, x): return self.head(self.extractor(x / 255))\n",
        r"output is not head\(extractor\(x\)\): move what make.forward does",
    ),
}


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """Writes nets.py into the current folder, which nothing but that makes importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])

    def write(text):
        lines = text.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        body = "\n".join(line[indent:] for line in lines)
        (tmp_path / "nets.py").write_text(HEADER + body + "\n")
        return "nets:make"

    yield write
    sys.modules.pop("nets", None)


@pytest.mark.parametrize("form", CONVERTIBLE)
def test_forms(nets, form):
    name = nets(CONVERTIBLE[form])
    models.check(name, (4,), 3)
    torch.manual_seed(0)
    model = models.build(name, (4,), 3)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)]
    assert list(model.state_dict()) == [
        f"{part}.{kind}" for part in ("extractor.0", "head") for kind in ("weight", "bias")
    ]
    x = torch.randn(6, 4)
    assert torch.equal(model(x), torch.nn.Sequential(*layers)(x))
    assert torch.equal(model.extractor(x), torch.nn.Sequential(*layers[:2])(x))


def test_the_check_leaves_the_random_numbers_alone(nets):
    name = nets(CONVERTIBLE["sequential"])
    before = torch.random.get_rng_state()
    models.check(name, (4,), 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_with_dropout_and_batchnorm_passes(nets):
    name = nets("""
        class make(nn.Module):
            def __init__(self, s, c):
                super().__init__()
                norm = nn.BatchNorm1d(5)
                self.extractor = nn.Sequential(nn.Linear(4, 5), norm, nn.Dropout(0.5))
                self.head = nn.Linear(5, c)

            def forward(self, x):
                return self.head(self.extractor(x))
    """)
    models.check(name, (4,), 3)


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(nets, fault):
    text, message = REFUSED[fault]
    with pytest.raises(ValueError, match=message) as error:
        models.check(nets(text), (4,), 3)
    assert "model nets:make" in str(error.value)


def test_no_such_module(nets, tmp_path):
    with pytest.raises(ValueError, match=r"pack.nets cannot be imported .* on every node") as error:
        models.check("pack.nets:make", (4,), 3)
    assert str(tmp_path) in str(error.value)


def test_an_error_of_another_kind_keeps_its_traceback(nets):
    with pytest.raises(ZeroDivisionError):
        models.check(nets("def make(s, c): return 1 / 0"), (4,), 3)


def test_safe_path_is_respected(nets):
    nets(CONVERTIBLE["sequential"])
    program = "from fedapa_mpi import models; models.check('nets:make', (4,), 3)"
    for option, ok in (("-c", True), ("-Pc", False)):
        done = subprocess.run(
            [sys.executable, option, program], env=environment(), capture_output=True, text=True
        )
        assert (done.returncode == 0) == ok, done.stderr


# -- whole runs ------------------------------------------------------------------------------------

TOKENS = """
    class Reader(nn.Module):  # sequences of token ids, which arrive as float32
        def __init__(self):
            super().__init__()
            self.embed, self.read = nn.Embedding(9, 4), nn.GRU(4, 6, batch_first=True)

        def forward(self, x):
            return self.read(self.embed(x.long()))[1][-1]

    def make(input_shape, classes):
        return nn.Sequential(Reader(), nn.Dropout(0.1), nn.Linear(6, classes))
"""


def sentences(seed, n=24, n_test=12):
    """Sequences of 7 tokens; those of class c hold only the tokens 3c, 3c + 1 and 3c + 2."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n + n_test,), generator=draw)
    x = 3 * y[:, None] + torch.randint(3, (n + n_test, 7), generator=draw)
    x = x.to(torch.uint8)
    return Shard(x[:n], y[:n], x[n:], y[n:], 3, scale=1.0, mean=(0.0,), std=(1.0,))


def test_a_federation_of_sequences(nets, tmp_path):
    name = nets(TOKENS)
    shards = [sentences(i, 20 + 4 * i) for i in range(3)]
    argv = ["fedapa", "--model", name, "--batch_size", "8", "--lr", "0.3", "--epochs", "4"]
    run = simulate(tmp_path / "whole", [*argv, "--rounds", "8"], shards)
    simulate(tmp_path / "halves", [*argv, "--rounds", "3"], shards)
    again = simulate(
        tmp_path / "halves", ["--resume", str(tmp_path / "halves"), "--rounds", "8"], shards
    )
    assert same(run.server(), again.server())
    for i, state in run.clients().items():
        assert same(state, again.clients()[i])
    assert "model/extractor.0.embed.weight" in run.clients()[0]
    assert run.rows()["accuracy/post/macro"][-1] > 0.8


@pytest.mark.parametrize("name", ["mlp", "nets:make"])
def test_a_federation_of_feature_vectors(nets, tmp_path, name):
    nets(CONVERTIBLE["attributes"])
    run = simulate(tmp_path / "run", ["--model", name, "--rounds", "3", "--batch_size", "4"])
    assert run.rows()["accuracy/post/macro"][-1] > 0.5


MLP = """
    def make(input_shape, classes):
        extractor = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()]
        return nn.Sequential(*extractor, nn.Linear(32, classes))
"""


@pytest.mark.mpi
def test_processes_find_the_module_in_the_current_folder(nets, tmp_path):
    """One process, three ranks and the console script; the same bits as the built-in mlp."""
    name = nets(MLP)
    launch = Launcher(tmp_path, ("--clients=5", "--rounds=2"))
    alone, ranks = (launch(n, f"--model={name}") for n in (None, 3))
    assert alone.fingerprint == ranks.fingerprint
    with launch(None, "--model=mlp").results() as built_in, ranks.results() as own:
        assert (built_in["loss"][:] == own["loss"][:]).all()
    script = "import sys; sys.path.remove(''); from fedapa_mpi.run import main; sys.exit(main())"
    command = [*mpirun(None), "-c", script, f"--model={name}", "--rounds=2", "--clients=5"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert alone.fingerprint in done.stdout, done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [None, 3])
def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(nets, tmp_path, ranks):
    name = nets("def make(s, c): return nn.Sequential(nn.Flatten(), nn.Linear(64, c))")
    done = Launcher(tmp_path)(ranks, f"--model={name}")
    assert done.err.count("fedapa-mpi: error: model nets:make: the extractor") == 1
    assert "Traceback" not in done.err
    assert done.rc == 2
    assert not done.folder.exists()

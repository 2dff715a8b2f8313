"""What every strategy promises to the round loop, and the reductions of one to another."""

import ast
import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import (
    batchnorm_model,
    make_parties,
    models_of,
    same,
    simulate,
    tiny_model,
    tiny_shards,
    train_round,
)

import fedapa_mpi
from fedapa_mpi import cli, strategies
from fedapa_mpi.comm.messages import copied
from fedapa_mpi.store.state import copy_of, nbytes

PACKAGE = Path(fedapa_mpi.__file__).parent
EVERY_STRATEGY = pytest.mark.parametrize("name", strategies.names())
EVERY_MODEL = pytest.mark.parametrize(
    "architecture", [tiny_model, batchnorm_model], ids=["plain", "batchnorm"]
)


def size(module):
    """Bytes of a model part on the wire: float32 parameters and floating-point buffers."""
    floats = [b.numel() for b in module.buffers() if b.is_floating_point()]
    return 4 * (sum(p.numel() for p in module.parameters()) + sum(floats))


def parameters(module):
    """P."""
    return sum(p.numel() for p in module.parameters())


def features(model):
    """D."""
    return fedapa_mpi.models.feature_size(model)


# bytes (down, up) per sampled client and round, as the strategy's docstring says: for a model and
# ``new`` [..., M], which clients have not answered in an earlier round. Every client of the tiny
# problem owns all of its 3 classes.
TRAFFIC = {
    "apple": lambda model, new: (
        (4 * parameters(model) + 8) * (new.shape[-1] - 1) + 4 * new.shape[-1] * new,
        4 * parameters(model),
    ),
    "dbe": lambda model, new: (size(model) + 4 * features(model) * new, size(model)),
    "fedala": lambda model, new: (size(model), size(model)),
    "fedamp": lambda model, new: (size(model), size(model)),
    "fedapa": lambda model, new: (size(model.extractor), size(model.extractor)),
    "fedavg": lambda model, new: (size(model), size(model)),
    "fedgh": lambda model, new: (size(model.head), 3 * (4 * features(model) + 8)),
    "fedpac": lambda model, new: (
        size(model) + 3 * (4 * features(model) + 8) * ~new.all(axis=-1, keepdims=True),
        size(model) + 12 * features(model) + 4 + 3 * (4 * features(model) + 16),
    ),
    "fedproto": lambda model, new: (
        3 * (4 * features(model) + 8) * ~new.all(axis=-1, keepdims=True),
        3 * (4 * features(model) + 16),
    ),
    "fedphp": lambda model, new: (size(model), size(model)),
    "local": lambda model, new: (0, 0),
    "pfedhn": lambda model, new: (4 * parameters(model), 4 * parameters(model)),
}


@pytest.fixture
def parties(name, architecture):
    """A server and three clients after two rounds; client 2 has not been sampled yet."""
    server, clients = make_parties(name, architecture=architecture)
    for t, ids in enumerate(([0, 1], [0]), start=1):
        train_round(server, clients, ids, t)
    return server, clients


# -- the contract --------------------------------------------------------------------------------


@EVERY_STRATEGY
@EVERY_MODEL
def test_download_is_pure_and_ascending(parties):
    server, _ = parties
    before = copy_of(server.state_dict())
    for ids in ([0, 1, 2], [1], [0, 2]):
        first = {i: copied(message) for i, message in server.download(ids, 3)}
        again = dict(server.download(ids, 3))
        assert list(first) == list(again) == ids
        assert all(same(first[i], again[i]) for i in ids)
        assert same(server.state_dict(), before)


@EVERY_STRATEGY
@EVERY_MODEL
def test_messages_are_copies(parties):
    server, clients = parties
    messages = {i: copied(message) for i, message in server.download([0, 1, 2], 3)}
    for i, client in clients.items():
        client.receive(messages[i])
        installed = copy_of(client.state_dict())
        for tensor in messages[i].values():
            tensor.fill_(1)  # the buffer that it came in is used again
        assert same(client.state_dict(), installed)
        upload = client.upload()
        kept = copied(upload)
        client.train(3)
        assert same(upload, kept)
        state = copy_of(client.state_dict())
        for tensor in upload.values():
            tensor.fill_(1)
        assert same(client.state_dict(), state)
        assert not same(installed, state)  # it did train


@EVERY_STRATEGY
@EVERY_MODEL
def test_what_arrived_is_copied_by_the_server(parties):
    server, clients = parties
    sent = {i: copied(message) for i, message in server.download([0, 1], 3)}
    uploads = {i: copied(clients[i].upload()) for i in sent}
    server.aggregate(sent, uploads, 3)
    after = copy_of(server.state_dict())
    for message in (*sent.values(), *uploads.values()):
        for tensor in message.values():
            tensor.fill_(1)
    assert same(server.state_dict(), after)


@EVERY_STRATEGY
@EVERY_MODEL
def test_state_has_fixed_names_and_shapes(parties, name, architecture):
    fresh_server, fresh_clients = make_parties(name, architecture=architecture)
    server, clients = parties
    for old, new in ((fresh_server, server), (fresh_clients[0], clients[0])):
        before, after = old.state_dict(), new.state_dict()  # raises for what no file could hold
        grown = after.keys() - before.keys()
        assert all(entry.startswith("optimizer") for entry in grown)
        for entry in before:
            assert before[entry].shape == after[entry].shape
            assert before[entry].dtype == after[entry].dtype
        old.load_state_dict(copy_of(after))
        assert same(old.state_dict(), after)


@EVERY_STRATEGY
@EVERY_MODEL
def test_every_upload_is_optional(parties):
    server, clients = parties
    sent = dict(server.download([0, 1, 2], 3))
    server.aggregate(sent, {}, 3)
    assert server.joined.tolist() == [True, True, False]
    server.aggregate(sent, {2: clients[2].upload()}, 4)
    assert server.joined.tolist() == [True, True, True]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in server.state_dict().values())


@EVERY_STRATEGY
@EVERY_MODEL
def test_bytes_are_those_of_the_docstring(parties, name, architecture):
    server, clients = parties
    new = np.array([False, False, True])
    down, up = (np.broadcast_to(v, 3) for v in TRAFFIC[name](architecture(), new))
    for i, message in server.download([0, 1, 2], 3):
        assert nbytes(message) == down[i]
        clients[i].receive(message)
        assert nbytes(clients[i].upload()) == up[i]


@EVERY_STRATEGY
@EVERY_MODEL
def test_what_a_newcomer_gets(parties, name, architecture):
    server, _ = parties
    before = copy_of(server.state_dict())
    message = server.newcomer()
    assert same(server.state_dict(), before)
    if message is None:
        return  # "not available"
    _, others = make_parties(name, architecture=architecture)
    others[0].receive(copied(message))
    for state in (message, others[0].state_dict()):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# What one client's round may change at the server: whole entries, and entries of which its row
OWN_UPDATE = {
    "apple": ((), ("core", "wanted")),
    "dbe": (("w", "w_buffers"), ()),
    "fedala": (("w", "w_buffers"), ()),
    "fedamp": (("xi",), ("w", "w_buffers")),
    "fedapa": ((), ("theta", "theta_buffers", "A", "A_momentum")),
    "fedavg": (("w", "w_buffers"), ()),
    "fedgh": (("head", "optimizer"), ()),
    "fedpac": (("theta", "theta_buffers", "proto", "known"), ("head",)),
    "fedphp": (("w", "w_buffers"), ()),
    "fedproto": (("proto", "known"), ()),
    "local": ((), ()),
    "pfedhn": (("hypernetwork", "optimizer"), ()),
}


@EVERY_STRATEGY
@EVERY_MODEL
def test_a_clients_round_changes_only_what_it_may(parties, name):
    server, clients = parties
    before = copy_of(server.state_dict())
    others = {i: copy_of(clients[i].state_dict()) for i in (0, 2)}
    own = copy_of(clients[1].state_dict())
    train_round(server, clients, [1], 3)
    assert all(same(clients[i].state_dict(), state) for i, state in others.items())
    assert not same(clients[1].state_dict(), own)
    whole, rows = OWN_UPDATE[name]
    for entry, after in server.state_dict().items():
        if entry not in before:
            assert entry.partition("/")[0] in {"optimizer"} & {*whole}, entry
        elif not torch.equal(before[entry], after) and entry.partition("/")[0] not in whole:
            assert entry in rows, entry
            assert torch.equal(before[entry][[0, 2]], after[[0, 2]]), entry


@EVERY_STRATEGY
@EVERY_MODEL
def test_a_class_that_nobody_owns(name, architecture):
    server, clients = make_parties(name, architecture=architecture)
    for client in clients.values():
        own = client.setup.shard
        two = dataclasses.replace(own, y=own.y.clamp(max=1))  # class 2 is in the test data only
        client.setup = dataclasses.replace(client.setup, shard=two)
    for t in (1, 2, 3):
        train_round(server, clients, [0, 1, 2], t)
    states = [party.state_dict() for party in (server, *clients.values())]
    assert all(bool(torch.isfinite(tensor).all()) for s in states for tensor in s.values())
    for client in clients.values():
        client.set_mode(training=False)
        x = client.shard.x
        answers = client.predict(x)
        assert bool(torch.isfinite(answers).all())
        assert (answers.argmax(dim=1) == 2).sum() <= len(x) // 4  # rarely, if at all


@EVERY_STRATEGY
def test_hello_says_how_many_samples(name):
    server, clients = make_parties(name)
    assert [client.hello()["n"].item() for client in clients.values()] == [12, 17, 22]
    assert server.n.tolist() == [12, 17, 22]
    assert server.n.dtype == torch.int64
    assert server.joined.tolist() == [False] * 3


@EVERY_STRATEGY
def test_nothing_depends_on_the_global_generator(name):
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        server, clients = make_parties(name)
        torch.rand(noise)
        train_round(server, clients, [0, 1, 2], 1)
        states.append((server.state_dict(), *(c.state_dict() for c in clients.values())))
    assert all(same(a, b) for a, b in zip(*states))


# -- whole runs ----------------------------------------------------------------------------------

FLAGS = ["--batch_size", "4", "--epochs", "1", "--lr", "0.02"]
MORE_FLAGS = {
    "pfedhn": ["--lr", "0.1", "--hn_lr", "0.1"]
}  # it starts far from any model, and slowly


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of six rounds of each strategy, with a checkpoint after every third."""
    made = {}

    def get(name):
        """By the strategy's name and, behind it, flags of its own."""
        if name not in made:
            strategy, *own = name.split()
            common = ["--rounds", "6", "--checkpoint_every", "3", *FLAGS]
            argv = [strategy, *common, *MORE_FLAGS.get(strategy, []), *own]
            made[name] = simulate(tmp_path_factory.mktemp("whole") / strategy, argv)
        return made[name]

    return get


@EVERY_STRATEGY
def test_learns(whole_run, name):
    rows = whole_run(name).rows()
    loss = np.nanmean(rows["loss"], axis=1)
    # means of four samples differ, and DBE's pull on them does not vanish
    assert loss[-1] < {"dbe": 0.8, "pfedhn": 0.9}.get(name, 0.6) * loss[0]
    assert rows["accuracy/post/macro"][-1] > 0.8  # chance is 1/3


SECOND_FORMS = (
    "apple --downloads=1",
    "dbe --initial_mean=exact",
    "fedala --top=4",
    "fedamp --form=cosine",
    "fedapa --preset=official --min_train=1 --min_test=1 --drop_last=auto",
    "fedphp --teaching=kd",
    "fedproto --aggregation=weighted --missing=rebuild",
    "pfedhn --order=parallel",
    "pfedhn --share=extractor",
)


@pytest.mark.parametrize("name", [*strategies.names(), *SECOND_FORMS])
def test_a_run_that_goes_on_from_a_checkpoint_ends_the_same(whole_run, name):
    run = whole_run(name)
    status = json.loads((run.folder / "status.json").read_text())
    end, server, clients = status["fingerprint"], run.server(), run.clients()
    last = run.checkpoints[-1]
    assert [path.name for path in run.checkpoints] == ["round-000003.h5", "round-000006.h5"]
    last.unlink()
    assert not same(run.server(), server) or name == "local"
    simulate(run.folder, ["--resume", str(run.folder)])
    status = json.loads((run.folder / "status.json").read_text())
    assert same(run.server(), server)
    assert all(same(state, clients[i]) for i, state in run.clients().items())
    assert status["fingerprint"] == end
    assert len(end) == 64


@EVERY_STRATEGY
def test_recorded_bytes_are_those_of_the_docstring(whole_run, name):
    rows = whole_run(name).rows()
    model = fedapa_mpi.models.mlp((4,), 3)
    earlier = np.cumsum(rows["answered"], axis=0) - rows["answered"]
    down, up = TRAFFIC[name](model, earlier == 0)
    assert np.array_equal(rows["bytes/down"], down * rows["sampled"])
    assert np.array_equal(rows["bytes/up"], up * rows["answered"])
    assert 0 < rows["sampled"].sum() < rows["sampled"].size


# -- reductions ----------------------------------------------------------------------------------

REDUCTIONS = [
    (["fedapa", "--eta", "0"], 4),
    (["fedapa", "--eta", "0", "--gradient", "centred", "--self_weight", "1"], 4),
    (["fedapa", "--eta", "0", "--order", "sequential", "--postprocess", "before_mix"], 4),
    (["fedapa", "--eta", "0", "--share", "model"], 4),
    (["fedapa", "--adapt", "false"], 4),
    (["fedapa", "--gradient", "printed", "--eta", "1"], 1),
    (["fedapa"], 1),
    (["fedapa", "--eta", "5", "--server_momentum", "0.9", "--gradient", "centred"], 1),
    (["fedavg"], 1),
]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory):
    made = {}

    def get(M):
        if M not in made:
            folder = tmp_path_factory.mktemp("local") / "run"
            made[M] = simulate(folder, ["local", "--rounds", "3", *FLAGS], tiny_shards(M))
        return made[M]

    return get


@pytest.mark.parametrize(("argv", "M"), REDUCTIONS, ids=lambda v: str(v).strip("[]"))
def test_reduces_to_local_bit_for_bit(tmp_path, local_run, argv, M):
    run, local = (
        simulate(tmp_path / "run", [*argv, "--rounds", "3", *FLAGS], tiny_shards(M)),
        local_run(M),
    )
    assert run.clients().keys() == local.clients().keys() == set(range(M))
    for i, state in run.clients().items():
        assert same(state, local.clients()[i])
    ours, theirs = run.rows(), local.rows()
    for name in ("loss", "accuracy/post/client", "accuracy/recv/client", "test_loss/post/client"):
        assert np.array_equal(ours[name], theirs[name], equal_nan=True)


def test_with_weights_that_move_it_is_not_local(tmp_path, local_run):
    run = simulate(tmp_path / "run", ["fedapa", "--rounds", "3", *FLAGS])
    ours, theirs = models_of(run), models_of(local_run(4))
    assert not any(same(ours[i], theirs[i]) for i in ours)


# -- what a file may hold ----------------------------------------------------------------------


def imports(path):
    """The modules that a file imports, names from a package as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def from_here(path):
    """Of those, what belongs to this package, as far as its modules go: strategies.base."""
    ours = {name.removeprefix("fedapa_mpi.") for name in imports(path) if name.startswith("fedapa")}
    modules = {
        ".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py")
    }
    found = {name if name in modules else name.rpartition(".")[0] for name in ours}
    return {name for name in found if name}


@EVERY_STRATEGY
def test_a_strategy_leaves_messages_files_and_environment_to_the_core(name):
    path = PACKAGE / "strategies" / f"{name}.py"
    tops = {module.partition(".")[0] for module in imports(path)}
    assert not tops & {"mpi4py", "h5py", "os", "subprocess", "socket"}
    assert "environ" not in path.read_text(encoding="utf-8")
    allowed = {"checks", "models", "training", "sgd", "streams", "data.federation"}
    others = {module for module in from_here(path) if not module.startswith("strategies")}
    assert others <= allowed


@pytest.mark.parametrize("folder", ["comm", "data", "store"])
def test_lower_layers_know_no_strategies_and_no_rounds(folder):
    above = {"strategies", "rounds", "conductor", "crew", "parties", "leading", "following", "run"}
    for path in (PACKAGE / folder).glob("*.py"):
        used = {module.partition(".")[0] for module in from_here(path)}
        assert not used & above, path
    # it can see one where there is one
    assert "strategies" in {m.partition(".")[0] for m in from_here(PACKAGE / "rounds.py")}


def test_only_the_transport_and_the_world_use_mpi():
    users = {
        p.relative_to(PACKAGE).as_posix()
        for p in PACKAGE.rglob("*.py")
        if any(name.startswith("mpi4py") for name in imports(p))
    }
    assert users == {"comm/transport.py", "comm/world.py"}


def test_importing_everything_starts_no_mpi():
    script = f"""
import sys
from fedapa_mpi import conductor, crew, following, leading, parties, plan, rounds, strategies
for name in {strategies.names()}:
    strategies.load(name)
heavy = "mpi4py torchvision matplotlib sklearn torch._dynamo pandas scipy".split()
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_these_tests_start_no_mpi():
    assert "mpi4py.MPI" not in sys.modules


# -- how they are found ------------------------------------------------------------------------


def test_names():
    assert {"fedapa", "fedavg", "local"} <= set(strategies.names())
    assert "base" not in strategies.names()
    assert set(TRAFFIC) >= set(strategies.names()), "add the new strategy's formula to TRAFFIC"


@EVERY_STRATEGY
def test_config_read_from_the_source_is_the_real_one(name):
    early, real = strategies.config_class(name), strategies.load(name).Config
    assert [(f.name, f.default) for f in dataclasses.fields(early)] == [
        (f.name, f.default) for f in dataclasses.fields(real)
    ]
    assert typing.get_type_hints(early) == typing.get_type_hints(real)
    for table in ("ORDERS", "PRESETS", "ONLY_IF"):
        assert getattr(early, table, None) == getattr(real, table, None)
    assert dataclasses.asdict(early()) == dataclasses.asdict(real())
    assert real.__dataclass_params__.frozen


@EVERY_STRATEGY
def test_every_flag_is_explained_and_none_hides_another(name):
    fields = [f.name for f in dataclasses.fields(strategies.config_class(name))]
    assert list(strategies.config_docs(name)) == fields
    assert all(text.endswith(".") for text in strategies.config_docs(name).values())
    common = {f.name for f in dataclasses.fields(fedapa_mpi.config.RunConfig)}
    assert not common & set(fields)
    help_text = " ".join(cli.parser(name).format_help().split())
    assert all(f"--{field} " in help_text for field in fields)
    assert all(text in help_text for text in strategies.config_docs(name).values())


@EVERY_STRATEGY
def test_docstring_cites_and_tells_traffic(name):
    text = strategies.load(name).__doc__
    assert "Traffic per sampled client and round:" in text
    assert "State:" in text
    assert "Held-out clients" in text
    server, _ = make_parties(name)
    assert ("Held-out clients: not available" in text) == (server.newcomer() is None)

"""A learnable problem small enough for every test, and whole runs of it inside this process."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn

from fedapa_mpi import cli, leading, start, strategies, streams
from fedapa_mpi.comm.messages import Message, copied
from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.comm.world import World
from fedapa_mpi.data.federation import Shard, data_hash
from fedapa_mpi.data.prepare import Federation
from fedapa_mpi.failing import Place
from fedapa_mpi.models import SplitModel
from fedapa_mpi.stopping import StopFlag
from fedapa_mpi.store import checkpoint
from fedapa_mpi.store.results import Results, Rows
from fedapa_mpi.store.state import State
from fedapa_mpi.strategies.base import Client, Server, Setup

INPUTS, CLASSES = 4, 3
CPU = torch.device("cpu")


def shard(n: int = 12, n_test: int = 6, seed: int = 0) -> Shard:
    """Three classes around three corners of a cube in four dimensions, well apart."""
    draw = torch.Generator().manual_seed(seed)

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(CLASSES, (count,), generator=draw)
        noise = 0.3 * torch.randn(count, INPUTS, generator=draw)
        return 2 * torch.eye(CLASSES, INPUTS)[y] + noise, y

    (x, y), (x_test, y_test) = samples(n), samples(n_test)
    return Shard(x, y, x_test, y_test, CLASSES, scale=1.0, mean=(0.0,), std=(1.0,))


def tiny_shards(clients: int, n: int = 12) -> list[Shard]:
    """Shards of different sizes, by client; client i's does not depend on how many there are."""
    return [shard(n + 5 * i, 6, seed=i) for i in range(clients)]


def tiny_model() -> SplitModel:
    """25 parameters in the extractor, 18 in the head."""
    return SplitModel(
        nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU()),
        nn.Linear(5, CLASSES),
    )


def batchnorm_model() -> SplitModel:
    """The same with BatchNorm: 10 more parameters, 10 numbers of statistics, one counter."""
    return SplitModel(
        nn.Sequential(nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.ReLU()),
        nn.Linear(5, CLASSES),
    )


class Values(nn.Module):
    """An extractor that is nothing but P parameters, for numbers worked by hand."""

    def __init__(self, P: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(P))


def vector_model(P: int) -> SplitModel:
    """A model whose extractor is a vector of P ones and whose head has no parameters."""
    return SplitModel(Values(P), nn.Identity())


def make_setup(
    config: object = None,
    *,
    clients: int = 3,
    architecture: Callable[[], SplitModel] = tiny_model,
    **changes: object,
) -> Setup:
    """A server's setup; with ``client`` and ``shard`` a client's."""
    values: dict = {
        "seed": 0,
        "lr": 0.1,
        "momentum": 0.9,
        "epochs": 1,
        "batch_size": 4,
        "drop_last": "auto",
        "client_opt": "persist",
        "horizon": 4,
        "participation": 0.8,
        "device": CPU,
    }
    values |= changes
    return Setup(
        config=config, clients=clients, classes=CLASSES, architecture=architecture, **values
    )


def make_parties(
    strategy: str, config: object = None, clients: int = 3, **changes: object
) -> tuple[Server, dict[int, Client]]:
    """A server that has welcomed its clients, and the clients."""
    module = strategies.load(strategy)
    config = config or module.Config()
    server = module.Server(make_setup(config, clients=clients, **changes))
    members = {}
    for i, own in enumerate(tiny_shards(clients)):
        setup = make_setup(config, clients=clients, client=i, shard=own, **changes)
        with streams.seeded(0, i, 0, "client"):
            members[i] = module.Client(setup)
    server.welcome({i: client.hello() for i, client in members.items()})
    return server, members


def play(
    server: Server,
    ids: Sequence[int],
    t: int,
    answer: Callable[[int, Message], Message],
    sequential: bool = False,
) -> None:
    """One round of the server in the order of the round loop; ``answer`` is a client's part."""
    for turn in Order(Action.ROUND, t, tuple(ids), sequential=sequential).turns():
        sent = dict(server.download(turn, t))
        uploads = {i: answer(i, copied(sent[i])) for i in turn}
        server.aggregate(sent, uploads, t)


def train_round(server: Server, clients: dict[int, Client], ids: Sequence[int], t: int) -> None:
    """One round of a whole strategy."""

    def answer(i: int, message: Message) -> Message:
        with streams.seeded(0, i, t, "train"):
            clients[i].receive(message)
            clients[i].train(t)
        return clients[i].upload()

    play(server, ids, t, answer)


class Run:
    """The folder of a run made by ``simulate``, opened as its files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def checkpoints(self) -> list[Path]:
        """Newest last."""
        return sorted((self.folder / "checkpoints").glob("round-*.h5"))

    def server(self) -> State:
        """The server's state in the newest checkpoint."""
        with checkpoint.Checkpoint(self.checkpoints[-1]) as stored:
            return stored.server()

    def clients(self) -> dict[int, State]:
        """The clients' states in the newest checkpoint."""
        with checkpoint.Checkpoint(self.checkpoints[-1]) as stored:
            return {i: stored.client(i) for i in stored.client_ids()}

    def rows(self) -> Rows:
        """What results.h5 says of each round."""
        return Results.open(self.folder / "results.h5").rows()


def simulate(folder: Path, argv: Sequence[str], shards: list[Shard] | None = None) -> Run:
    """A whole run as one process, data apart; ``argv`` without ``--out`` and ``--clients``."""
    resume = "--resume" in argv
    shards = shards or tiny_shards(4)
    where = [] if resume else ["--out", str(folder), "--clients", str(len(shards))]
    settled = start.settle(cli.read([*argv, *where]))
    federation = Federation(
        shards,
        shards[0].classes,
        shards[0].input_shape,
        np.array([np.bincount(s.y, minlength=shards[0].classes) for s in shards]),
        np.array([s.n_test for s in shards]),
        "partition",
        data_hash(shards),
    )
    alone = World(None, 0, 1, 0, "here")
    guard = SimpleNamespace(place=Place(), tell=None)
    with (
        mock.patch.object(leading, "prepare", return_value=federation),
        mock.patch.object(sys.stderr, "isatty", return_value=False),
    ):
        assert leading.lead(settled, alone, StopFlag(), guard) == 0
    return Run(folder)


def same(a: State, b: State) -> bool:
    """Whether two states or messages hold the same bits under the same names."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def models_of(run: Run) -> dict[int, State]:
    """Each client's model in a run's newest checkpoint."""
    return {
        i: {name: tensor for name, tensor in state.items() if name.startswith("model/")}
        for i, state in run.clients().items()
    }

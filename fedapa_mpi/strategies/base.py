"""The contract of a strategy, with defaults that are local training.

A strategy is a module with three names: ``Config`` (a frozen dataclass: its flags), ``Server``
(one object, on rank 0) and ``Client`` (one object per client). A round is

    download -> receive -> (evaluate) -> train -> (evaluate) -> upload -> aggregate

and the core does everything around it: messages, devices, traffic, time, evaluation, state.

Letters: M clients, K of them sampled, C classes, P parameters of the part that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedapa_mpi import streams, training
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel
from fedapa_mpi.sgd import SGD
from fedapa_mpi.store.state import Stateful

Message = dict[str, Tensor]  # what crosses the wire
Messages = Mapping[int, Message]  # by client, ascending


def _never() -> None:
    """The poll of a party that nobody can interrupt."""


@dataclass(frozen=True)
class Setup:
    """What a server or a client is made from. Configuration and data: no checkpoint holds it."""

    config: Any  # the strategy's own Config
    clients: int  # M
    classes: int  # C
    seed: int
    lr: float
    momentum: float
    epochs: int  # E
    batch_size: int  # B
    drop_last: str  # "auto", "true" or "false"
    client_opt: str  # "persist" or "reset"
    horizon: int  # T of the first start: what schedules that depend on T use
    participation: float  # expected share of the clients that a round samples, E[K] / M
    architecture: Callable[[], SplitModel]
    device: torch.device
    client: int = streams.SERVER
    shard: Shard | None = None  # the client's data, on its device; None at the server
    poll: Callable[[], None] = _never  # to be called between batches; may raise Abandoned

    def make_model(self, owner: int = streams.SERVER) -> SplitModel:
        """The common initial model, the same for the server and all clients; or one of a client."""
        with streams.seeded(self.seed, owner, 0, "model"):
            return self.architecture().to(self.device)

    def generator(self, t: int, purpose: str) -> torch.Generator:
        """The stream of (seed, this client, round t, purpose), at its start."""
        return streams.generator(self.seed, self.client, t, purpose)


class Server(Stateful):
    """The server's side; these defaults send nothing and learn nothing."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.n = torch.zeros(setup.clients, dtype=torch.int64)  # [M] training samples
        self.joined = torch.zeros(setup.clients, dtype=torch.bool)  # [M] has sent an upload

    def welcome(self, hellos: Messages) -> None:
        """Takes every client's ``hello``, once, before round 1."""
        for i, hello in hellos.items():
            self.n[i] = hello["n"]

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """Yields (client, message) for the given clients, ascending. Changes no state."""
        for i in ids:
            yield i, {}

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """Takes a round's uploads {client: message}, ascending; maybe none.

        ``sent[i]`` is bit for bit what client i received in this round. ``uploads`` may hold
        fewer clients than ``sent``: some fail to answer.
        """
        for i in uploads:
            self.joined[i] = True

    def newcomer(self) -> Message | None:
        """What a client outside the federation gets at the end of a run, to start from.

        None: this method has nothing for such a client ("not available").
        """
        return None

    def weights(self) -> Tensor | None:
        """The matrix [M, M] that results record as ``/A``; None if there is no such thing."""
        return None

    def notices(self) -> list[str]:
        """What the user should know about these settings, said once when a run starts."""
        return []


class Client(Stateful):
    """A client's side; these defaults train the client's own model and share nothing.

    ALSO names further ways of answering: for each there is a method ``predict_NAME``, and the
    results hold its accuracy beside that of ``predict``.
    """

    ALSO: ClassVar[tuple[str, ...]] = ()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = setup.make_model()
        self.optimizer = SGD(self.model.parameters(), lr=setup.lr, momentum=setup.momentum)

    @property
    def shard(self) -> Shard:
        """This client's data, on its device."""
        assert self.setup.shard is not None
        return self.setup.shard

    def hello(self) -> Message:
        """What the server has to know before round 1; start-up, not method traffic."""
        return {"n": torch.tensor(self.shard.n)}

    def receive(self, message: Message) -> None:
        """Installs what came. The message's memory is not the client's: copy what is kept."""

    def train(self, t: int) -> float:
        """Local training of round t; the mean loss over its steps, NaN if there were none."""
        if self.setup.client_opt == "reset":
            self.optimizer.state.clear()
        return training.fit(self, t)

    def upload(self) -> Message:
        """What goes to the server after training."""
        return {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The training loss of a batch, x [B, ...], y [B] int64."""
        return F.cross_entropy(self.predict(x), y)

    def predict(self, x: Tensor) -> Tensor:
        """Scores [B, C] of the model that this client would use."""
        return self.model(x)

    def set_mode(self, training: bool) -> None:
        """Puts every module into training or evaluation mode, which no state holds."""
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                value.train(training)


def shares(n: Tensor) -> Tensor:
    """n_i / sum n, float64; all the same if no client has a sample."""
    counts = n.double() if n.any() else torch.ones_like(n, dtype=torch.float64)
    return counts / counts.sum()


def weighted_mean(messages: Messages, name: str, n: Tensor) -> Tensor:
    """sum_i (n_i / sum n) * message_i[name], in client order; weights are formed first."""
    weights = shares(torch.stack([n[i] for i in messages])).tolist()
    mean: Tensor | None = None
    for weight, message in zip(weights, messages.values(), strict=True):
        part = weight * message[name]
        mean = part if mean is None else mean + part
    assert mean is not None, "a mean of no uploads"
    return mean


def average(uploads: Messages, n: Tensor, name: str, values: Tensor, buffers: Tensor) -> None:
    """Replaces parameters [P] and buffers [Q], maybe none, by the weighted means of uploads."""
    values.copy_(weighted_mean(uploads, name, n))
    if buffers.numel():
        buffers.copy_(weighted_mean(uploads, f"{name}_buffers", n))

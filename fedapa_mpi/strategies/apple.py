"""APPLE: every client learns by which weights it adds up the core models of all clients.

J. Luo, S. Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning",
IJCAI 2022, arXiv 2110.08394.

Letters: c_j [P] the core model of client j, p_i [M] the directed relationships of client i (never
sent), p0 = (n_j / N)_j their start, v_i = sum_j p_ij c_j the personalised model, T the horizon.
State: the server keeps core [M, P], wanted [M, M]; a client c_i, p_i, their optimizer, v_i and the
cores that it got. Memory: (M + 3) P numbers per client, twice that while it trains; M P on the
server, and another k P for each client sampled in a round.
Round: cores of others go down, all or ``downloads`` of them; for each batch v_i is formed anew and
its gradient reaches c_i and p_i only: p_ii g and <g, c_j>, plus mu lambda(r) (p_i - p0) from the
regulariser mu/2 lambda(r) ||p_i - p0||^2; lambda falls from 1 in the first round to 0 in round
``loosen`` * T. c_i comes up and replaces the server's; nothing is averaged. What a client with
limited downloads wants next rides in its upload.
Traffic per sampled client and round: 4 P k bytes of cores and 8 k of ids (int64) down, with
k = M - 1, or ``downloads`` if that is less; 4 P up (float32; P: all parameters). Until the server
has an upload of the client, 4 M down for p0; with fewer than all cores, M up for ``wanted`` (bool).
Held-out clients: not available, p_i has no place for them.
Evaluation: v_i, ``recv`` with the cores just downloaded, ``post`` with the new c_i and p_i.
Defaults: ``p_lr`` 0.001 is the authors', for 800 epochs; 0.01 suits short runs, but may diverge.
Deviations: one common initial model, so that the first v_i is it (authors: ``initial_cores=own``);
mu/2 as in the text, their code drops the 1/2. Cores not yet downloaded count as the client's own
first one. p_i has fresh momentum each round, c_i as --client_opt says. Buffers stay with clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedapa_mpi import models, streams
from fedapa_mpi.checks import within
from fedapa_mpi.sgd import SGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.parts import relationships


@dataclass(frozen=True)
class Config:
    """The switches of APPLE."""

    p_lr: float = 0.001
    """Learning rate of the relationships p_i."""
    mu: float = 0.1
    """Weight of the regulariser that holds p_i at its start."""
    loosen: float = 0.1
    """Share of the rounds after which the regulariser is gone."""
    schedule: Literal["exponential", "cosine"] = "exponential"
    """How the regulariser fades."""
    downloads: int = 0
    """Most core models that a client downloads in a round; 0: all."""
    initial_cores: Literal["common", "own"] = "common"
    """Whether all core models start equal."""

    def __post_init__(self) -> None:
        within(self, p_lr="[0, inf)", mu="[0, inf)", loosen="[0, inf)", downloads="[0, inf)")


class Server(base.Server):
    """Keeps the newest core model of every client and hands out the others'."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        M = setup.clients
        owners = [streams.SERVER] if setup.config.initial_cores == "common" else range(M)
        cores = torch.stack([models.vector(setup.make_model(j)) for j in owners])
        self.core = cores.expand(M, -1).clone()  # [M, P]
        self.wanted = relationships.first(setup)  # [M, M] row i: whose cores client i gets next

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The cores that each client wants, and p0 until it has answered."""
        for i in ids:
            wanted = self.wanted[i].nonzero()[:, 0]
            p0 = {} if self.joined[i] else {"p0": base.shares(self.n).float()}
            yield i, {"ids": wanted, "core": self.core[wanted]} | p0

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """Replaces the cores of those who answered."""
        super().aggregate(sent, uploads, t)
        for i, upload in uploads.items():
            self.core[i] = upload["core"]
            self.wanted[i] = upload.get("wanted", self.wanted[i])

    def notices(self) -> list[str]:
        """Settings under which the relationships stay where they start."""
        frozen = ["p_lr=0: the relationships are not learned, all clients mix by sample counts"]
        return frozen * (self.setup.config.p_lr == 0)


class Client(base.Client):
    """Learns its core model and its relationships; its model is v_i."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        i, M, config = setup.client, setup.clients, setup.config
        self.model = setup.make_model(i if config.initial_cores == "own" else streams.SERVER)
        first = models.vector(self.model)
        self.core = nn.Parameter(first.clone())  # [P]
        self.had = torch.arange(M, device=setup.device) == i  # [M] whose core is known
        self.cores = first.repeat(M, 1)  # [M, P] those of others
        self.cores[self.had] = 0  # row i stays 0
        self.wanted = torch.zeros_like(self.had)  # [M] whose core to ask for
        self.p0 = self.had.float()  # [M] until the server's comes
        self.p = nn.Parameter(self.p0.clone())  # [M]
        self.pull = 0.0  # mu lambda(r)
        groups = [{"params": [self.core]}, {"params": [self.p], "lr": config.p_lr}]
        self.optimizer = SGD(groups, lr=setup.lr, momentum=setup.momentum)

    @torch.no_grad()
    def receive(self, message: Message) -> None:
        """Keeps the cores that came and forms v_i."""
        self.cores[message["ids"]] = message["core"]
        self.had[message["ids"]] = True
        if "p0" in message:
            self.p0.copy_(message["p0"])
            self.p.copy_(message["p0"])
        models.set_vector(self.model, self._mixture())

    def train(self, t: int) -> float:
        """E epochs on c_i and p_i, then v_i and the next relationships."""
        config, L = self.setup.config, self.setup.config.loosen * self.setup.horizon
        self.pull = config.mu * relationships.relaxation(t - 1, L, config.schedule)
        self.optimizer.state.pop(self.p, None)
        loss = super().train(t)
        models.set_vector(self.model, self._mixture())
        if relationships.limited(self.setup):
            self.wanted = relationships.following(self.setup, self.had, self.p.detach(), t)
        return loss

    def upload(self) -> Message:
        """c_i, and with limited downloads whose cores to send next."""
        core = {"core": self.core.detach().clone()}
        return core | {"wanted": self.wanted.clone()} if relationships.limited(self.setup) else core

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of v_i, whose gradient reaches c_i and p_i, and the regulariser."""
        v = models.named(self.model, self._mixture())
        hold = self.pull / 2 * (self.p - self.p0).square().sum() if self.pull else 0.0
        return nn.functional.cross_entropy(functional_call(self.model, v, (x,)), y) + hold

    def _mixture(self) -> Tensor:
        return self.p @ self.cores + self.p[self.setup.client] * self.core  # v_i [P]

"""APPLE: every client learns by which weights it adds up the core models of all clients.

J. Luo, S. Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning",
IJCAI 2022, arXiv 2110.08394.

Letters: c_j [P] the core model of client j, p_i [M] the directed relationships of client i (never
sent), p0 = (n_j / N)_j their start, v_i = sum_j p_ij c_j the personalised model, T the horizon.

State: the server keeps core [M, P] and wanted [M, M]; a client c_i, p_i, their optimizer, v_i (its
model) and the cores it has downloaded. Memory: (M + 3) P numbers per client, twice that while it
trains; on the server M P, and in a round k P for each sampled client (k: cores that it gets).
Round: cores of others go down, all or ``downloads`` of them; for each batch v_i is formed anew and
its gradient reaches c_i and p_i only: p_ii g and <g, c_j>, plus mu lambda(r) (p_i - p0) from the
regulariser mu/2 lambda(r) ||p_i - p0||^2. lambda falls from 1 in the first round and is 0 from
round ``loosen`` * T on. c_i comes up and replaces the server's; nothing is averaged.
With ``downloads`` = m a client asks first for cores it never had, then draws from all others with
probability ~ base^|p_ij|, base = max(1.5, m r / M); what it wants next rides in its upload.
Traffic per sampled client and round: 4 P k bytes of cores and 8 k of ids (int64) down, with
k = M - 1, or ``downloads`` if that is less; 4 P up (float32; P: all parameters). Until the server
has an upload of the client, 4 M down for p0; with fewer than all cores, M up for ``wanted`` (bool).
Held-out clients: not available, p_i has no place for them.
Evaluation: v_i, ``recv`` with the cores just downloaded, ``post`` with the new c_i and p_i.

Where the sources differ, and choices:

* Core step. c_i learns with --lr, as in the authors' code, and v_i sees p_ii^2 of each step. A
  public library takes --lr times M and freezes p_i; on the digits that diverges. The rates are the
  authors' for 800 epochs: a short run needs a larger ``p_lr`` (0.01) or --lr to get as far.
* Regulariser. With 1/2, as in the text; the authors' code drops it, so its mu counts twice ours.
* Start. One common initial model, so that the first v_i is it; the authors' code draws a core per
  client (``initial_cores=own``). Cores not downloaded yet count as the client's own first one.
* Optimizer. That of c_i follows ``--client_opt``; momentum of p_i starts afresh each round.
* Buffers (BatchNorm statistics) are those of v_i: they stay with the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedapa_mpi import models, streams
from fedapa_mpi.sgd import SGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message


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
        for name in ("p_lr", "mu", "loosen"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}, expected a finite number of 0 or more")
        if self.downloads < 0:
            raise ValueError(f"downloads is {self.downloads}, expected 0 (all) or more")


class Server(base.Server):
    """Keeps the newest core model of every client and hands out the others'."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        M = setup.clients
        owners = [streams.SERVER] if setup.config.initial_cores == "common" else range(M)
        cores = torch.stack([initial_core(setup, j) for j in owners])
        self.core = cores.expand(M, -1).clone()  # [M, P]
        # [M, M] row i: whose cores client i gets next
        self.wanted = torch.zeros(M, M, dtype=torch.bool, device=setup.device)
        for i in range(M):
            order = torch.randperm(M, generator=streams.generator(setup.seed, i, 0, "wanted"))
            self.wanted[i, order[order != i][: most(setup)]] = True

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The cores that each client wants, and p0 until it has answered."""
        for i in ids:
            wanted = self.wanted[i].nonzero()[:, 0]
            message = {"ids": wanted, "core": self.core[wanted]}
            yield i, message if self.joined[i] else message | {"p0": self._p0()}

    def aggregate(
        self, sent: Mapping[int, Message], uploads: Mapping[int, Message], t: int
    ) -> None:
        """Replaces the cores of those who answered."""
        super().aggregate(sent, uploads, t)
        for i, upload in uploads.items():
            self.core[i] = upload["core"]
            if "wanted" in upload:
                self.wanted[i] = upload["wanted"]

    def notices(self) -> list[str]:
        """Settings under which the relationships stay where they start."""
        if self.setup.config.p_lr == 0:
            return ["p_lr=0: the relationships are not learned, all clients mix by sample counts"]
        return []

    def _p0(self) -> Tensor:
        n = self.n.double()
        return (n / n.sum() if n.any() else torch.full_like(n, 1 / len(n))).float()


class Client(base.Client):
    """Learns its core model and its relationships; its model is v_i."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        i, M, config = setup.client, setup.clients, setup.config
        first = initial_core(setup, streams.SERVER if config.initial_cores == "common" else i)
        models.set_vector(self.model, first)
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
        """E epochs on c_i and p_i, then v_i and the next wishes."""
        config, L = self.setup.config, self.setup.config.loosen * self.setup.horizon
        self.pull = config.mu * relaxation(t - 1, L, config.schedule)
        self.optimizer.state.pop(self.p, None)
        loss = super().train(t)
        with torch.no_grad():
            models.set_vector(self.model, self._mixture())
        if most(self.setup) < self.setup.clients - 1:
            self._choose(t)
        return loss

    def upload(self) -> Message:
        """c_i, and with limited downloads whose cores to send next."""
        message = {"core": self.core.detach().clone()}
        limited = most(self.setup) < self.setup.clients - 1
        return message | ({"wanted": self.wanted.clone()} if limited else {})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of v_i, whose gradient reaches c_i and p_i, and the regulariser."""
        named = dict(self.model.named_parameters())
        parts = self._mixture().split([w.numel() for w in named.values()])
        v = {name: part.view_as(named[name]) for name, part in zip(named, parts, strict=True)}
        loss = F.cross_entropy(functional_call(self.model, v, (x,)), y)
        if self.pull == 0:
            return loss
        return loss + self.pull / 2 * (self.p - self.p0).square().sum()

    def _mixture(self) -> Tensor:
        return self.p @ self.cores + self.p[self.setup.client] * self.core  # v_i [P]

    def _choose(self, t: int) -> None:
        setup, draw = self.setup, self.setup.generator(t, "wanted")
        m, M = most(setup), setup.clients
        new = (~self.had).cpu().nonzero()[:, 0]
        new = new[torch.randperm(len(new), generator=draw)][:m]
        strength = self.p.detach().abs().double().cpu()
        base = max(1.5, m * t / M)
        chance = (base ** (strength - strength.max())).nan_to_num(1.0).clamp_min(1e-30)
        chance[new] = chance[setup.client] = 0
        self.wanted.fill_(False)
        self.wanted[new] = True
        if len(new) < m:
            self.wanted[torch.multinomial(chance, m - len(new), generator=draw)] = True


def most(setup: base.Setup) -> int:
    """How many core models a client downloads in a round."""
    others = setup.clients - 1
    return min(setup.config.downloads, others) or others


def initial_core(setup: base.Setup, owner: int) -> Tensor:
    """The parameters that the owner's stream draws, [P]; the server's are common to all."""
    with streams.seeded(setup.seed, owner, 0, "model"):
        return models.vector(setup.architecture().to(setup.device))


def relaxation(r: int, L: float, schedule: str) -> float:
    """lambda(r): 1 at r = 0, 0 from L on."""
    if r >= L:
        return 0.0
    return (math.cos(math.pi * r / L) + 1) / 2 if schedule == "cosine" else 1e-3 ** (r / L)

"""APPLE: every client learns by which weights it adds up the core models of all clients.

J. Luo, S. Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning",
IJCAI 2022, arXiv 2110.08394.

Letters: c_j [P] the core model of client j, p_i [M] the directed relationships of client i (never
sent), p0 = (n_j / N)_j their start, v_i = sum_j p_ij c_j the personalised model, T the horizon.

State: the server keeps core [M, P] and wanted [M, M]; a client c_i, p_i, their optimizer, v_i (its
model) and the cores it has downloaded. That is (M + 1) P numbers per client, and the server has
(M - 1) P in memory for each client that it sends to.
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

* Core step. A step of c_i moves v_i by p_ii^2, about 1/M^2, of it, and all clients' steps together
  by about 1/M. ``core_rate=clients`` multiplies --lr by M, as a public library does; ``plain`` is
  the authors' code, which trains 800 epochs.
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
    core_rate: Literal["clients", "plain"] = "clients"
    """Learning rate of core models: --lr times the number of clients, or --lr."""
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
        self.core = torch.stack([models.vector(initial_core(setup, j)) for j in range(M)])  # [M, P]
        self.wanted = torch.zeros(M, M, dtype=torch.bool)  # [M, M] row i: what client i gets next
        for i in range(M):
            others = [j for j in range(M) if j != i]
            draw = streams.generator(setup.seed, i, 0, "wanted")
            first = torch.randperm(M - 1, generator=draw)[: most(setup)]
            self.wanted[i, torch.tensor(others, dtype=torch.int64)[first]] = True

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The cores that each client wants, and p0 until it has answered."""
        for i in ids:
            wanted = self.wanted[i].nonzero()[:, 0]
            message = {"ids": wanted, "core": self.core[wanted.to(self.core.device)]}
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
        self.model = initial_core(setup, i)
        self.core = nn.Parameter(models.vector(self.model))  # [P]
        self.cores = models.vector(self.model).repeat(M, 1)  # [M, P] of the others:
        self.cores[i] = 0  # row i stays 0
        self.had = torch.eye(M, dtype=torch.bool)[i]  # [M] whose core is known
        self.wanted = torch.zeros(M, dtype=torch.bool)  # [M] whose core to ask for
        self.p0 = self.core.new_zeros(M).index_fill(0, torch.tensor(i), 1.0)  # until it comes
        self.p = nn.Parameter(self.p0.clone())  # [M]
        self.pull = 0.0  # mu lambda(r)
        lr = setup.lr * (M if config.core_rate == "clients" else 1)
        self.optimizer = SGD(
            [{"params": [self.core], "lr": lr}, {"params": [self.p], "lr": config.p_lr}],
            lr=lr,
            momentum=setup.momentum,
        )

    ...

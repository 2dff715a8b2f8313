"""FedPAC: features aligned to global prototypes, heads combined by what fits each client's data.

J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and
Classifier Collaboration", ICLR 2023, arXiv 2306.11867.

Letters: theta [P] the extractor, phi_i [Q] client i's head, z = f(theta; x) [D] a feature, n_ic
the samples of class c at client i, m_ic [D] their mean feature, proto_c [D] the global prototype.
State: the server keeps theta, all phi_i as combined last, proto, and how many programmes had no
solution; a client its model, two optimizers, the targets of its features, h_i and v_i.
Round: theta, proto and phi_i go down. Before any training the client takes h_i [C, D] with rows
(n_ic / n_i) m_ic and v_i = (mean ||z||^2 - ||h_i||^2) / n_i over all its samples. It trains phi for
an epoch of cross entropy (CE), theta fixed; then theta for E epochs, phi fixed, of CE + lam * mean
(z - target_y)^2 over batch and features; target_c is proto_c, or m_ic from before training if c has
none (no pull while no class has one). theta_i, phi_i, h_i, v_i and the new m_ic with n_ic come up.
theta = sum_i (n_i / N) theta_i; proto_c = sum_i (n_ic / N_c) m_ic over the owners of c, without any
it stays; phi_i = sum_j alpha_j phi_j where alpha >= 0, sum alpha = 1 makes alpha^T P_i alpha least,
P_i = diag(v) + (<h_i - h_j, h_i - h_k>)_jk; alpha_j < 0.001 are dropped, the rest rescaled.
Traffic per sampled client and round: 4 (P + Q) + m (4 D + 8) bytes down, 4 (P + Q) + 4 C D + 4 +
m_i (4 D + 16) up (float32; class ids, counts int64; m classes have a prototype, the client owns
m_i), and 4 bytes each way for each element of the extractor's floating-point buffers.
Defaults, the authors': lam = 1, head step 0.1, fresh momentum each round (``--client_opt reset``):
carried over, it makes features and prototypes drive each other up, on Fashion-MNIST to overflow.
Evaluation: ``recv`` with the new theta and phi_i, ``post`` after training; the authors log both.
Held-out clients get what everybody gets first: theta, proto and the initial head.
Deviations: momentum and E are the run's (authors: 0.5 with weight decay 5e-4, and 5); a class that
nobody owned in the last round keeps its prototype; a client whose programme has no solution keeps
its head, with a warning. What public codes make of it: FAULTS.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedapa_mpi import models, training
from fedapa_mpi.checks import within
from fedapa_mpi.sgd import SGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.parts import heads, prototypes

log = logging.getLogger("fedapa_mpi")


@dataclass(frozen=True)
class Config:
    """The pull of the features, and the head phase."""

    lam: float = 1.0
    """Weight of the pull of features to the prototypes; 0: heads collaborate, features do not."""
    head_lr: float = 0.1
    """Learning rate of the head, which is trained for one epoch before the extractor."""

    PRESETS: ClassVar = {"paper": {"client_opt": "reset"}}

    def __post_init__(self) -> None:
        within(self, lam="[0, inf)", head_lr="(0, inf)")


class Server(base.Server):
    """Averages extractors and prototypes, combines heads."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model = setup.make_model()
        self.theta = models.vector(model.extractor)  # [P]
        self.theta_buffers = models.buffers(model.extractor)
        self.head = models.vector(model.head).repeat(setup.clients, 1)  # [M, Q]
        self.proto, self.known = prototypes.table(setup)  # [C, D], [C]
        self.unsolved = 0  # programmes without a solution

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """theta and the prototypes for everyone, and each one's own head."""
        common = self.newcomer()
        yield from ((i, common | {"head": self.head[i]}) for i in ids)

    def newcomer(self) -> Message:
        """theta, the prototypes and the initial head."""
        theta = models.packed("theta", self.theta, self.theta_buffers)
        head = models.vector(self.setup.make_model().head)
        return theta | prototypes.outgoing(self.proto, self.known) | {"head": head}

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """New theta, prototypes, and heads of those who answered."""
        super().aggregate(sent, uploads, t)
        if uploads:
            base.average(uploads, self.n, "theta", self.theta, self.theta_buffers)
        prototypes.average(self.proto, self.known, uploads, weighted=True)
        for i, error in heads.combine(self.head, uploads, self.n).items():
            self.unsolved += 1
            text = f"client {i} keeps its head, no mixture was found ({self.unsolved} so far)"
            log.warning("round %d: %s: %s", t, text, error)

    def notices(self) -> list[str]:
        """Settings under which features are not aligned, or run away."""
        carried = self.setup.client_opt == "persist" and self.setup.momentum > 0
        runs_away = ["client_opt=persist: momentum may drive features up without end"] * carried
        apart = "lam=0: features are not aligned, only heads are combined"
        return runs_away if self.setup.config.lam else [apart, *runs_away]


class Client(base.Client):
    """Trains the head, then the extractor towards the prototypes."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model, momentum, head_lr = self.model, setup.momentum, setup.config.head_lr
        self.optimizer = SGD(model.extractor.parameters(), lr=setup.lr, momentum=momentum)
        self.optimizer_head = SGD(model.head.parameters(), lr=head_lr, momentum=momentum)
        self.target, self.known = prototypes.table(setup)  # [C, D], and [C] whether it is a proto
        self.aligned = self.head_phase = False
        self.h, self.v = torch.zeros_like(self.target), torch.zeros(1, device=setup.device)

    def receive(self, message: Message) -> None:
        """Replaces extractor and head, and takes the prototypes as targets."""
        models.install(self.model.extractor, "theta", message)
        models.set_vector(self.model.head, message["head"])
        prototypes.install(self.target, self.known, message)
        self.aligned = len(message["ids"]) > 0

    def train(self, t: int) -> float:
        """Statistics, one epoch of the head, E epochs of the extractor; the loss of the latter."""
        if self.setup.client_opt == "reset":
            self.optimizer_head.state.clear()
        self.h, self.v, means = heads.statistics(self)
        self.target[~self.known] = means[~self.known]
        self.head_phase = True
        training.fit(self, t, optimizer=self.optimizer_head, epochs=1, purpose="head batches")
        self.head_phase = False
        return super().train(t)

    def upload(self) -> Message:
        """theta_i, phi_i, class means of the trained extractor, and the statistics from before."""
        fit = {"head": models.vector(self.model.head), "h": self.h.clone(), "v": self.v.clone()}
        return models.outgoing(self.model.extractor, "theta") | fit | training.class_means(self)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy; in the extractor phase also the pull of the features."""
        z, lam = self.model.extractor(x), self.setup.config.lam
        if self.head_phase:
            return F.cross_entropy(self.model.head(z.detach()), y)
        loss = F.cross_entropy(self.model.head(z), y)
        return loss + lam * F.mse_loss(z, self.target[y]) if lam and self.aligned else loss

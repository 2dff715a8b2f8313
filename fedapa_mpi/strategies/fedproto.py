"""FedProto: clients share the mean features of their classes, and no weights at all.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype
Learning across Heterogeneous Clients", AAAI 2022.

Letters: f(x) [D] features; P_c [D] the global prototype of class c, m of C classes have one; p_ic
[D] the mean feature of the n_ic samples of class c at client i, which owns m_i classes; lam the
weight of the pull to the prototypes.
State: the server keeps the P_c [C, D] and which are known [C]; a client its whole model, its
optimizer and the P_c it received last.
Round: the known P_c go down; E epochs of SGD on all parameters, on cross entropy + lam times the
mean over batch and features of (f(x) - P_y)^2, where samples of a class without prototype (in
round 1 all) count with 0; p_ic and n_ic come up; P_c becomes the mean of p_ic over the owners who
answered. Without any c keeps P_c (``missing=rebuild``: loses it, unless nobody answered at all).
Traffic per sampled client and round: (4 D + 8) m bytes down, (4 D + 16) m_i up (float32 features,
int64 class ids and, up, int64 counts), whatever the size of the model.
Evaluation: the nearest prototype and, as ``head``, the local head; ``recv`` with new prototypes,
``post`` after local training. A class without prototype is never answered; for the test loss it
counts as 100 beyond twice the farthest one. Without any candidate the head answers.
Held-out clients start from the common initial model and the prototypes.
Defaults: lam 1 (paper; the authors take 0.1 for CIFAR-10), plain mean (the authors' code).
Where the sources differ: the paper's formula takes the mean by n_ic (``aggregation=weighted``)
and divides once more by the number of owners, which shrinks all prototypes and which no public
code does. p_ic is the mean over all training samples after training, in evaluation mode (paper);
the authors' code averages what the last epoch saw. It answers only classes that the client owns
(``candidates=own``), and its clients start from different initial models, ours from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedapa_mpi import training
from fedapa_mpi.checks import within
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.parts import prototypes


@dataclass(frozen=True)
class Config:
    """How prototypes are formed, followed and asked."""

    lam: float = 1.0
    """Weight of the pull of features to the prototypes of their classes."""
    aggregation: Literal["plain", "weighted"] = "plain"
    """A prototype is the mean over its owners: all alike, or by their samples of the class."""
    missing: Literal["retain", "rebuild"] = "retain"
    """A class that nobody sent in a round keeps its prototype, or loses it."""
    candidates: Literal["all", "own"] = "all"
    """Classes that may be answered: all with a prototype, or those the client has samples of."""

    def __post_init__(self) -> None:
        within(self, lam="[0, inf)")


class Server(base.Server):
    """Holds the global prototypes [C, D]."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.proto, self.known = prototypes.table(setup)  # [C, D], [C]

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The same known prototypes for everyone."""
        for i in ids:
            yield i, self.newcomer()

    def newcomer(self) -> Message:
        """The known prototypes [m, D] with their classes [m]."""
        return prototypes.outgoing(self.proto, self.known)

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """The mean of each class over its owners, in client order."""
        super().aggregate(sent, uploads, t)
        if uploads and self.setup.config.missing == "rebuild":
            self.known.zero_()
        weighted = self.setup.config.aggregation == "weighted"
        prototypes.average(self.proto, self.known, uploads, weighted)

    def notices(self) -> list[str]:
        """Without the pull nobody learns from anybody."""
        return [] if self.setup.config.lam else ["lam=0: every model is trained as by Local"]


class Client(base.Client):
    """Trains its own model towards the prototypes."""

    ALSO: ClassVar[tuple[str, ...]] = ("head",)

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.proto, self.known = prototypes.table(setup)  # [C, D], [C]

    def receive(self, message: Message) -> None:
        """Replaces all prototypes."""
        prototypes.install(self.proto, self.known, message)

    def upload(self) -> Message:
        """Mean features [m_i, D] of the classes it owns, class ids and counts [m_i]."""
        return training.class_means(self)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of the head, and the pull to the prototypes."""
        z = self.model.extractor(x)
        loss = F.cross_entropy(self.model.head(z), y)
        target = torch.where(self.known[y, None], self.proto[y], z.detach())  # [B, D]
        return loss + self.setup.config.lam * F.mse_loss(z, target)

    def predict(self, x: Tensor) -> Tensor:
        """Minus the distance to each prototype, [B, C]."""
        candidates = self.known.clone()
        if self.setup.config.candidates == "own":
            candidates &= torch.bincount(self.shard.y, minlength=self.setup.classes) > 0
        if not candidates.any():
            return self.predict_head(x)
        z, mode = self.model.extractor(x), "donot_use_mm_for_euclid_dist"  # it loses digits
        distance = torch.cdist(z, self.proto, compute_mode=mode)  # [B, C]
        beyond = 2 * distance[:, candidates].amax(dim=1, keepdim=True) + 100
        return -torch.where(candidates, distance, beyond)

    def predict_head(self, x: Tensor) -> Tensor:
        """Scores [B, C] of the local head."""
        return self.model(x)

"""FedPAC: features aligned to global prototypes, heads combined by what fits each client's data.

J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and
Classifier Collaboration", ICLR 2023, arXiv 2306.11867.

Letters: theta [P] the extractor, phi_i [Q] client i's head, z = f(theta; x) [D] a feature, n_ic
the samples of class c at client i, m_ic [D] their mean feature, proto_c [D] the global prototype.
State: the server keeps theta, the heads [M, Q] as combined last, proto [C, D], which classes have
one, and how many programmes had no solution; a client its model, two optimizers, the targets
[C, D] of its features and its statistics h_i, v_i.
Round: theta, proto and phi_i go down. Before any training and over all its samples the client
takes h_i [C, D] with rows (n_ic / n_i) m_ic (0 for classes that it lacks) and v_i = (mean ||z||^2
- ||h_i||^2) / n_i. It trains phi for an epoch of cross entropy (CE), theta fixed; then theta for E
epochs, phi fixed, of CE + lam * mean (z - target_y)^2 over batch and features; target_c is proto_c,
or m_ic from before training if c has none (no pull while no class has one). theta_i, phi_i, h_i,
v_i and the new m_ic with n_ic come up. The server takes theta = sum_i (n_i / N) theta_i and
proto_c = sum_i (n_ic / N_c) m_ic over the owners of c; without any, proto_c stays. phi_i becomes
sum_j alpha_j phi_j with alpha the minimum of alpha^T P_i alpha over alpha >= 0, sum alpha = 1,
P_i = diag(v) + (<h_i - h_j, h_i - h_k>)_jk; alpha_j < 0.001 are dropped, the rest rescaled.
Traffic per sampled client and round: 4 (P + Q) + m (4 D + 8) bytes down, 4 (P + Q) + 4 C D + 4 +
m_i (4 D + 16) up (float32; class ids and counts int64; m classes have a prototype, the client
owns m_i), and 4 bytes each way for each element of the extractor's floating-point buffers.
Defaults, the authors': lam = 1, head step 0.1, and momentum that starts anew in each round
(``--client_opt reset``). Carried over, it makes features and prototypes drive each other up:
measured on Fashion-MNIST with pathological clients, until they overflow.
Evaluation: ``recv`` with the new theta and phi_i, ``post`` after training; the authors log both.
Held-out clients get what everybody gets first: theta, proto and the initial head.
Deviations: momentum is the run's (authors: 0.5, weight decay 5e-4). Public codes forget a class
that nobody owned in the last round; where rounding makes an eigenvalue of P_i negative they drop
all small ones, which loses the optimum (here those below 0 count as 0); some do not divide after
dropping, or mix up clients. No solution: the client keeps its own head, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedapa_mpi import models, training
from fedapa_mpi.sgd import SGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message

log = logging.getLogger("fedapa_mpi")
LEAST = 1e-3  # smaller shares of a head are dropped


@dataclass(frozen=True)
class Config:
    """The pull of the features, and the head phase."""

    lam: float = 1.0
    """Weight of the pull of features to the prototypes; 0: heads collaborate, features do not."""
    head_lr: float = 0.1
    """Learning rate of the head, which is trained for one epoch before the extractor."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"client_opt": "reset"}}

    def __post_init__(self) -> None:
        if not 0 <= self.lam < float("inf"):
            raise ValueError(f"lam is {self.lam}, expected a finite weight of 0 or more")
        if not 0 < self.head_lr < float("inf"):
            raise ValueError(f"head_lr is {self.head_lr}, expected a finite step above 0")


class Server(base.Server):
    """Averages extractors and prototypes, combines heads."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model, M, C = setup.make_model(), setup.clients, setup.classes
        self.theta = models.vector(model.extractor)  # [P]
        self.theta_buffers = models.buffers(model.extractor)
        self.head = models.vector(model.head).repeat(M, 1)  # [M, Q]
        self.proto = torch.zeros(C, models.feature_size(model), device=setup.device)  # [C, D]
        self.known = torch.zeros(C, dtype=torch.bool, device=setup.device)  # has a prototype
        self.unsolved = 0  # programmes without a solution

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """theta and the prototypes for everyone, and each one's own head."""
        common = self._common()
        for i in ids:
            yield i, common | {"head": self.head[i]}

    def newcomer(self) -> Message:
        """theta, the prototypes and the initial head."""
        return self._common() | {"head": models.vector(self.setup.make_model().head)}

    def aggregate(
        self, sent: Mapping[int, Message], uploads: Mapping[int, Message], t: int
    ) -> None:
        """New theta, prototypes, and heads of those who answered."""
        super().aggregate(sent, uploads, t)
        if not uploads:
            return
        self.theta.copy_(base.weighted_mean(uploads, "theta", self.n))
        if self.theta_buffers.numel():
            self.theta_buffers.copy_(base.weighted_mean(uploads, "theta_buffers", self.n))
        self._average_means(uploads)
        self._combine_heads(uploads, t)

    def notices(self) -> list[str]:
        """Settings under which features are not aligned, or run away."""
        notices = []
        if not self.setup.config.lam:
            notices.append("lam=0: features are not aligned, only heads are combined")
        if self.setup.client_opt == "persist" and self.setup.momentum:
            notices.append("client_opt=persist: momentum may drive features up without end")
        return notices

    def _common(self) -> Message:
        ids = self.known.nonzero().flatten()
        buffers = {"theta_buffers": self.theta_buffers} if self.theta_buffers.numel() else {}
        return {"theta": self.theta, "proto": self.proto[ids], "ids": ids} | buffers

    def _average_means(self, uploads: Mapping[int, Message]) -> None:
        """proto_c = sum_i (n_ic / N_c) m_ic, weights first, in client order."""
        N = torch.zeros_like(self.known, dtype=torch.int64)  # [C]
        for upload in uploads.values():
            N[upload["ids"]] += upload["count"]
        self.proto[N > 0] = 0
        self.known |= N > 0
        for upload in uploads.values():
            weight = (upload["count"].double() / N[upload["ids"]]).float()
            self.proto[upload["ids"]] += weight[:, None] * upload["mean"]

    def _combine_heads(self, uploads: Mapping[int, Message], t: int) -> None:
        """phi_i = sum_j alpha_j phi_j, among all who answered and have samples."""
        for i in uploads:
            self.head[i] = uploads[i]["head"]
        ids = [i for i in uploads if self.n[i]]
        if not ids:
            return
        heads = self.head[ids]  # [K, Q]
        h = torch.stack([uploads[i]["h"].flatten() for i in ids]).double()  # [K, C D]
        v = torch.cat([uploads[i]["v"] for i in ids]).double()  # [K]
        for k, i in enumerate(ids):
            try:
                alpha = solve(programme(h @ h.T, v, k))
            except (RuntimeError, ValueError) as error:  # what eigh and nnls raise
                self.unsolved += 1
                text = "round %d: client %d keeps its head, no mixture was found (%d so far): %s"
                log.warning(text, t, i, self.unsolved, error)
            else:
                self.head[i] = alpha.to(heads) @ heads


class Client(base.Client):
    """Trains the head, then the extractor towards the prototypes."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model, momentum, head_lr = self.model, setup.momentum, setup.config.head_lr
        self.optimizer = SGD(model.extractor.parameters(), lr=setup.lr, momentum=momentum)
        self.optimizer_head = SGD(model.head.parameters(), lr=head_lr, momentum=momentum)
        shape = setup.classes, models.feature_size(model)
        self.target = torch.zeros(shape, device=setup.device)  # [C, D]
        self.known = torch.zeros(shape[0], dtype=torch.bool, device=setup.device)  # proto came
        self.aligned = self.head_phase = False
        self.h = torch.zeros(shape, device=setup.device)  # [C, D]
        self.v = torch.zeros(1, device=setup.device)

    def receive(self, message: Message) -> None:
        """Replaces extractor and head, and takes the prototypes as targets."""
        models.install(self.model.extractor, "theta", message)
        models.set_vector(self.model.head, message["head"])
        self.known.zero_()
        self.known[message["ids"]] = True
        self.target[message["ids"]] = message["proto"]
        self.aligned = len(message["ids"]) > 0

    def train(self, t: int) -> float:
        """Statistics, one epoch of the head, E epochs of the extractor; the latter's mean loss."""
        if self.setup.client_opt == "reset":
            self.optimizer.state.clear()
            self.optimizer_head.state.clear()
        self._take_statistics()
        self.head_phase = True
        training.fit(self, t, optimizer=self.optimizer_head, epochs=1, purpose="head batches")
        self.head_phase = False
        return training.fit(self, t)

    def upload(self) -> Message:
        """theta_i, phi_i, class means of the trained extractor, and the statistics from before."""
        mean, ids, count = training.class_means(self)
        part = models.outgoing(self.model.extractor, "theta")
        part |= {"head": models.vector(self.model.head), "h": self.h.clone(), "v": self.v.clone()}
        return part | {"mean": mean, "ids": ids, "count": count}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy; in the extractor phase also the pull of the features."""
        z, lam = self.model.extractor(x), self.setup.config.lam
        if self.head_phase:
            return F.cross_entropy(self.model.head(z.detach()), y)
        loss = F.cross_entropy(self.model.head(z), y)
        return loss + lam * F.mse_loss(z, self.target[y]) if lam and self.aligned else loss

    @torch.no_grad()
    def _take_statistics(self) -> None:
        """h_i, v_i, and own means as targets of classes without a prototype, in float64."""
        x, y, n = self.shard.x, self.shard.y, self.shard.n
        if not n:
            return
        self.set_mode(training=False)
        parts = x.split(training.EVALUATION_BATCH)
        z = torch.cat([self.model.extractor(part) for part in parts]).double()  # [n, D]
        owner = F.one_hot(y, self.setup.classes).double()  # [n, C]
        h = owner.T @ z / n  # [C, D]
        self.h.copy_(h)
        v = (z.square().sum(dim=1).mean() - h.square().sum()) / n
        self.v.fill_(v.clamp(min=0))  # it is 0 or more but for rounding
        means = h / owner.mean(dim=0).clamp(min=1 / n)[:, None]
        self.target[~self.known] = means[~self.known].float()


def programme(G: Tensor, v: Tensor, i: int) -> Tensor:
    """P_i [K, K] from the inner products G [K, K] of the h and from v [K], all float64."""
    P = v.diag() + G[i, i] - G[i][:, None] - G[i] + G
    return (P + P.T) / 2


def solve(P: Tensor) -> Tensor:
    """The alpha [K] >= 0 with sum 1 that minimises alpha^T P alpha, small ones dropped.

    By non-negative least squares: over x >= 0, x^T P x + c^2 (sum x - 1)^2 is least at a multiple
    of that alpha, whatever c > 0.

    Raises:
        RuntimeError, ValueError: no solution was found.
    """
    from scipy.optimize import nnls  # imported here: a third of a second, of the server alone

    values, vectors = torch.linalg.eigh(P)
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # P = root^T root
    c = P.diagonal().max().sqrt().item() or 1.0
    A = torch.cat([root, torch.full_like(root[:1], c)]).cpu().numpy()
    x = torch.from_numpy(nnls(A, [0.0] * len(P) + [c])[0])
    alpha = x.to(P) / x.sum()
    slope = P @ alpha  # at the minimum, no share can be moved to where it costs less
    if not (slope - alpha @ slope).min() >= -1e-9 * c**2:
        raise RuntimeError("what the solver found is not the minimum")
    alpha[alpha < min(LEAST, alpha.max().item())] = 0  # of thousands all may be small
    return alpha / alpha.sum()

"""FedPHP: every client keeps an inherited private model, which teaches the model it trains.

X.-C. Li, D.-C. Zhan, Y. Shao, B. Li, S. Song, "FedPHP: Federated Personalization with Inherited
Private Models", ECML PKDD 2021.

Letters: w [P] the global model, w_i the student trained from it, p_i the inherited private model
(HPM), z_i how often client i has taken part, Z the expected number of times over the whole run.

State: the server keeps w and the floating-point buffers (it is FedAvg's server); a client its
student, its optimizer, p_i and z_i. Before a client's first round p_i is the initial model.
Round: w goes down; E epochs of SGD on (1 - lam) cross entropy + lam R, where R draws the student to
the frozen teacher p_i; then p_i = m p_i + (1 - m) w_i with m = min(mu z_i / Z, mu), so that p_i is
w_i after the first; w_i comes up and is averaged by sample count. Z = max(floor(T E[K] / M), 1).
R: ``mmd`` is the squared maximum mean discrepancy of the batch's features (five Gaussian kernels,
bandwidths 1/4 to 4 times the mean squared distance); ``kd`` the cross entropy of the student's
answers to the teacher's, softened by temperature 4 on the teacher's side only.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and
4 bytes each way for each element of the floating-point buffers.
Held-out clients start from w; before they train, they answer with the initial model.
Evaluation: always p_i; ``recv`` before the round, ``post`` after it has inherited. Public codes
differ: one evaluates the student instead.
Defaults, the authors': lam 0.1, mu 0.9, MMD, which teaches from the first round on.
Deviations from the authors' code: gradients are not clipped (at 100 there), no round is stretched
to five batches, and the optimizer follows ``--client_opt`` (fresh each round there), as for all
methods here. p_i inherits floating-point buffers (BatchNorm statistics) as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedapa_mpi import models
from fedapa_mpi.checks import within
from fedapa_mpi.strategies import base, fedavg
from fedapa_mpi.strategies.base import Message

KERNELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # bandwidths, in units of the mean squared distance
TEMPERATURE = 4.0  # of the teacher


@dataclass(frozen=True)
class Config:
    """The switches of FedPHP."""

    lam: float = 0.1
    """Weight of the teacher against the labels, at least 0 and below 1."""
    teaching: Literal["mmd", "kd"] = "mmd"
    """What the teacher passes on: the distribution of features, or its answers."""
    mu: float = 0.9
    """Largest share of the old private model in the new one."""
    teach_first: bool = True
    """Whether the initial model already teaches in a client's first round."""

    def __post_init__(self) -> None:
        within(self, lam="[0, 1)", mu="[0, 1]")  # with lam = 1 the labels would not count at all


class Server(fedavg.Server):
    """FedAvg's: the private models never leave the clients."""

    def notices(self) -> list[str]:
        """Settings that switch a part of the method off."""
        config = self.setup.config
        if config.lam == 0 and config.mu == 0:
            return ["lam=0 and mu=0: this is FedAvg, evaluated after local training"]
        if config.lam == 0:
            return ["lam=0: the private model does not teach, the student is FedAvg's"]
        if config.mu == 0:
            return ["mu=0: nothing is inherited, the private model is the last student"]
        return []


class Client(base.Client):
    """Trains a student under its private model, then lets that inherit from the student."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.p = setup.make_model().requires_grad_(False)
        self.z = 0

    def receive(self, message: Message) -> None:
        """The student starts from w; p_i stays."""
        models.install(self.model, "w", message)

    def train(self, t: int) -> float:
        """The student's epochs, then the inheritance."""
        loss = super().train(t)
        self._inherit()
        return loss

    def upload(self) -> Message:
        """w_i after training."""
        return models.outgoing(self.model, "w")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """(1 - lam) CE + lam R."""
        config = self.setup.config
        z = self.model.extractor(x)
        logits = self.model.head(z)
        loss = F.cross_entropy(logits, y)
        if config.lam == 0 or (self.z == 0 and not config.teach_first):
            return loss
        R = kd(logits, self.p(x)) if config.teaching == "kd" else mmd(z, self.p.extractor(x))
        return (1 - config.lam) * loss + config.lam * R

    def predict(self, x: Tensor) -> Tensor:
        """The private model answers."""
        return self.p(x)

    def set_mode(self, training: bool) -> None:
        """As for all clients, but the teacher never trains."""
        super().set_mode(training)
        self.p.eval()

    def _inherit(self) -> None:
        setup = self.setup
        # 0.29 * 100 is 28.999...
        Z = max(math.floor(setup.horizon * setup.participation + 1e-9), 1)
        share = min(setup.config.mu * self.z / Z, setup.config.mu)
        for get, put in (
            (models.vector, models.set_vector),
            (models.buffers, models.set_buffers),
        ):  # lerp is exact where both are equal, and at share 0
            put(self.p, torch.lerp(get(self.model), get(self.p), share))
        self.z += 1


def mmd(z: Tensor, z_teacher: Tensor) -> Tensor:
    """Squared MMD between two batches of features, [B, D] each."""
    B = len(z)
    both = torch.cat([z, z_teacher])
    # differences, not products: equal features are at distance 0
    d = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()  # [2B, 2B]
    # every feature the same (all units dead): no distance, and no bandwidth to divide by
    bandwidth = (d.detach().sum() / (4 * B * B - 2 * B)).clamp_min(1e-20)
    k = torch.stack([torch.exp(-d / (bandwidth * factor)) for factor in KERNELS]).sum(dim=0)
    return (k[:B, :B] + k[B:, B:] - k[:B, B:] - k[B:, :B]).mean()


def kd(logits: Tensor, logits_teacher: Tensor) -> Tensor:
    """Cross entropy of the student's answers to the teacher's softened ones, [B, C] each."""
    return F.cross_entropy(logits, torch.softmax(logits_teacher / TEMPERATURE, dim=1))

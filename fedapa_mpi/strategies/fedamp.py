"""FedAMP: each client gets a mixture of all models in which models near its own weigh more.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated
Learning on Non-IID Data", AAAI 2021.

Letters: w_j [P] the model that client j sent last, d_ij = ||w_i - w_j||^2, A(d) = 1 - exp(-d/sigma)
the attention-inducing function, xi [M, M] the weights, u_i = sum_j xi_ij w_j the cloud model.

State: the server keeps w [M, P], the floating-point buffers and xi; a client its model, its
optimizer and u_i. Clients that have not joined stand for the common initial model.
Round: u_i goes down, E epochs of SGD on cross entropy + prox/2 ||w - u_i||^2 over all parameters,
w_i comes up. ``form=attention``: xi_ij = alpha_k A'(d_ij) for j != i, xi_ii = 1 - their sum, with
alpha_k = step * sigma / (M - 1), so that u_i is a convex combination. ``form=cosine`` (HeurFedAMP):
xi_ii is fixed and the rest is shared out as softmax_j(scale * cos(w_i, w_j)).
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and
4 bytes each way for each element of the floating-point buffers.
Held-out clients start from the uniform mean of the models of all clients that have joined.
Evaluation: ``recv`` is u_i (with ``start=own`` the client's own model), ``post`` is w_i.
Defaults: sigma, written 0, is the median of the d_ij above 0 in the present round: one small beside
the d_ij shares nothing. Training starts at u_i; ``start=own`` starts at w_i and only pulls.
Deviations: prox is the paper's lambda / alpha_k: as sigma follows the models, a fixed lambda would
pull without bound while they are equal. step is constant, the paper lowers alpha_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedapa_mpi import models
from fedapa_mpi.checks import within
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.parts import mixing
from fedapa_mpi.strategies.parts.geometry import cosines, squared_distances


@dataclass(frozen=True)
class Config:
    """The switches of FedAMP."""

    form: Literal["attention", "cosine"] = "attention"
    """Weights from squared distances, or the paper's heuristic from angles."""
    sigma: float = 0.0
    """Squared distance at which attention has fallen to 1/e; 0: the median of the round."""
    step: float = 1.0
    """Share of the largest alpha_k that keeps mixtures convex."""
    scale: float = 25.0
    """Factor of the cosines in the exponent."""
    self_weight: float = 0.0
    """Weight xi_ii of a client's own model; 0: 1/M."""
    prox: float = 0.1
    """Weight lambda/alpha_k of the pull towards u_i in local training."""
    start: Literal["cloud", "own"] = "cloud"
    """Where local training begins: at u_i, or at the client's own model."""

    ONLY_IF: ClassVar = {
        **dict.fromkeys(("sigma", "step"), ("form", ("attention",))),
        **dict.fromkeys(("scale", "self_weight"), ("form", ("cosine",))),
    }

    def __post_init__(self) -> None:
        within(self, sigma="[0, inf)", scale="[0, inf)", prox="[0, inf)", step="(0, 1]")
        within(self, self_weight="[0, 1]")


class Server(base.Server):
    """Keeps every client's model and mixes them by nearness."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model, M = setup.make_model(), setup.clients
        self.w = models.vector(model).repeat(M, 1)  # [M, P]
        self.w_buffers = models.buffers(model).repeat(M, 1)  # [M, Q]
        self.xi = weights_of(self.w, setup.config)  # [M, M] float64

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """u_i of each client, from one product for the whole round."""
        yield from mixing.mixtures("u", ids, self.xi[list(ids)], self.w, self.w_buffers)

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """Stores what came and weighs anew."""
        super().aggregate(sent, uploads, t)
        mixing.collect("w", uploads, self.w, self.w_buffers)
        if uploads:
            self.xi.copy_(weights_of(self.w, self.setup.config))

    def newcomer(self) -> Message:
        """The uniform mean of the models of all clients that have joined."""
        return mixing.mean_of_joined("u", self.joined, self.w, self.w_buffers)

    def weights(self) -> Tensor:
        """xi [M, M], by which the next round mixes."""
        return self.xi

    def notices(self) -> list[str]:
        """Settings under which nothing is shared."""
        config, notices = self.setup.config, []
        if config.start == "own" and config.prox == 0:
            notices.append("start=own without prox: this is local training")
        if config.form == "cosine" and config.self_weight == 1:
            notices.append("self_weight=1: every client gets back its own model, nothing is shared")
        if config.form == "cosine" and config.scale == 0:
            notices.append("scale=0: all others' models weigh the same, whatever their angles")
        return notices


class Client(base.Client):
    """Trains near its cloud model u_i."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.u = models.vector(self.model)  # [P]

    def receive(self, message: Message) -> None:
        """Keeps u_i, and starts from it unless told to start from its own model."""
        self.u.copy_(message["u"])
        if self.setup.config.start == "cloud":
            models.install(self.model, "u", message)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy + prox/2 ||w - u_i||^2, whose gradient is prox (w - u_i)."""
        loss, prox = super().loss(x, y), self.setup.config.prox
        if prox == 0:
            return loss
        w = torch.cat([p.reshape(-1) for p in self.model.parameters()])
        return loss + prox / 2 * (w - self.u).square().sum()

    def upload(self) -> Message:
        """w_i after training."""
        return models.outgoing(self.model, "w")


def weights_of(w: Tensor, config: Config) -> Tensor:
    """The rows of xi [M, M] float64 for models w [M, P]; each sums to 1."""
    if config.form == "attention":
        d = squared_distances(w)
        apart = d[d > 0]  # none: all models are equal, and any sigma gives the same u_i
        sigma = config.sigma or (apart.median() if len(apart) else 1.0)
        xi = config.step / max(len(w) - 1, 1) * torch.exp(-d / sigma)  # alpha_k A'(d_ij)
    else:
        own, others = config.self_weight or 1 / len(w), cosines(w).fill_diagonal_(-torch.inf)
        xi = (1 - own) * torch.softmax(config.scale * others, dim=1)
    xi.fill_diagonal_(0)
    return xi + torch.diag(1 - xi.sum(dim=1))

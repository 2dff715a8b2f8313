"""FedAMP: each client gets a mixture of all models in which models near its own weigh more.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated
Learning on Non-IID Data", AAAI 2021.

Letters: w_j [P] the model that client j sent last, d_ij = ||w_i - w_j||^2, A(d) = 1 - exp(-d/sigma)
the attention-inducing function, xi [M, M] the weights, u_i = sum_j xi_ij w_j the cloud model.

State: the server keeps w [M, P], the floating-point buffers and xi; a client its model, its
optimizer and u_i.
Round: u_i goes down, E epochs of SGD on cross entropy + prox/2 ||w - u_i||^2 over all parameters,
w_i comes up. ``form=attention``: xi_ij = alpha_k A'(d_ij) for j != i, xi_ii = 1 - their sum, with
alpha_k = step * sigma / (M - 1), so that u_i is a convex combination. ``form=cosine`` (HeurFedAMP):
xi_ii is fixed and the rest is shared out as softmax_j(scale * cos(w_i, w_j)).
Clients that have not joined stand for the common initial model.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and
4 bytes each way for each element of the floating-point buffers.
Held-out clients start from the uniform mean of the models of all clients that have joined.
Evaluation: ``recv`` is u_i (with ``start=own`` the client's own model), ``post`` is w_i.

Deviations and choices:

* prox is the paper's lambda / alpha_k, one number in place of two: as sigma follows the models, a
  fixed lambda would pull without bound while they are still equal.
* sigma = 0 stands for the median of the d_ij above 0 of the present round: any fixed sigma that is
  small beside the d_ij shares nothing. The paper lowers alpha_k over the rounds; step is constant.
* ``start=cloud`` begins local training at u_i, ``own`` at w_i and only pulls. Public re-
  implementations start at w_i and lose the gradient of the pull, which is local training.
* xi mixes floating-point buffers (BatchNorm statistics) too; distances and angles see parameters
  only, and integer counters stay with the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedapa_mpi import models
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message

COLUMNS = 1 << 15  # distances are summed over blocks of parameters, so that float64 stays small


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

    ONLY_IF: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "sigma": ("form", ("attention",)),
        "step": ("form", ("attention",)),
        "scale": ("form", ("cosine",)),
        "self_weight": ("form", ("cosine",)),
    }

    def __post_init__(self) -> None:
        for name in ("sigma", "scale", "prox"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}, expected a finite number of 0 or more")
        if not 0 < self.step <= 1:
            raise ValueError(f"step is {self.step}, expected above 0 and at most 1")
        if not 0 <= self.self_weight <= 1:
            raise ValueError(f"self_weight is {self.self_weight}, expected in [0, 1]")


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
        rows = self.xi[list(ids)].to(self.w)  # [K, M]
        u, buffers = rows @ self.w, rows @ self.w_buffers
        for k, i in enumerate(ids):
            yield i, _message(u[k], buffers[k])

    def aggregate(
        self, sent: Mapping[int, Message], uploads: Mapping[int, Message], t: int
    ) -> None:
        """Stores what came and weighs anew."""
        super().aggregate(sent, uploads, t)
        for i, upload in uploads.items():
            self.w[i] = upload["w"]
            if "w_buffers" in upload:
                self.w_buffers[i] = upload["w_buffers"]
        if uploads:
            self.xi.copy_(weights_of(self.w, self.setup.config))

    def newcomer(self) -> Message:
        """The uniform mean of the models of all clients that have joined."""
        part = self.joined if self.joined.any() else ~self.joined
        return _message(self.w[part].mean(dim=0), self.w_buffers[part].mean(dim=0))

    def weights(self) -> Tensor:
        """xi [M, M], by which the next round mixes."""
        return self.xi

    def notices(self) -> list[str]:
        """Settings under which nothing is shared."""
        config = self.setup.config
        if config.start == "own" and config.prox == 0:
            return ["start=own without prox: this is local training"]
        if config.form == "cosine" and config.self_weight == 1:
            return ["self_weight=1: every client gets back its own model, nothing is shared"]
        return []


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
    M = len(w)
    d = squared_distances(torch.cat([torch.zeros_like(w[:1]), w]))  # row 0: from the origin
    if config.form == "attention":
        d = d[1:, 1:]
        apart = d[d > 0]  # none: all models are equal, and any sigma gives the same u_i
        sigma = config.sigma or (apart.median() if len(apart) else 1.0)
        xi = config.step / max(M - 1, 1) * torch.exp(-d / sigma)  # alpha_k A'(d_ij)
    else:
        norm = d[0, 1:].sqrt().clamp_min(1e-30)
        cosine = (d[0, 1:] + d[1:, :1] - d[1:, 1:]) / 2 / norm / norm[:, None]
        cosine.fill_diagonal_(-torch.inf)
        own = config.self_weight or 1 / M
        xi = (1 - own) * torch.softmax(config.scale * cosine, dim=1)
    xi.fill_diagonal_(0)
    return xi + torch.diag(1 - xi.sum(dim=1))


def squared_distances(w: Tensor) -> Tensor:
    """||w_i - w_j||^2 [M, M] float64; exactly 0 where models are equal."""
    d = w.new_zeros(len(w), len(w), dtype=torch.float64)
    for block in w.split(COLUMNS, dim=1):  # differences, not products, so that 0 is exact
        part = block.double()
        d += torch.cdist(part, part, compute_mode="donot_use_mm_for_euclid_dist").square()
    return d


def _message(u: Tensor, buffers: Tensor) -> Message:
    return {"u": u} | ({"u_buffers": buffers} if buffers.numel() else {})

"""DBE: FedAvg with a personal bias on the features and a pull of their mean to a common one.

J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "Eliminating Domain Bias for
Federated Learning in Representation Space", NeurIPS 2023 (FedAvg + DBE).

Letters: w = [theta; phi] the model, P its parameters, z = f(theta; x) [D] features, h(phi; z) the
head; b_i [D] the personal bias, zbar_i [D] the running mean of z at client i, zbar_g [D] the
consensus; kappa the weight of the pull, mu that of the newest batch in the running mean.
State: the server keeps w and zbar_g, which never changes; a client its model, b_i (0 at first),
the optimizer of both, zbar_i and its copy of zbar_g.
Before round 1 every client trains the common initial model for E epochs on cross entropy (CE)
alone, follows zbar_i <- (1 - mu) zbar_i + mu mean_batch(z) from 0, and throws the model away.
zbar_i travels in ``hello`` (start-up, 4 D bytes); zbar_g = sum_i (n_i / N) zbar_i.
Round: w goes down; zbar_i = 0; E epochs of SGD on w and b_i (no momentum for b_i) of
CE(h(phi; z + b_i)) + kappa mean_D 1/2 (zbar_i - zbar_g)^2, zbar_i with the batch in it, whose
gradient flows through that batch only; w_i comes up and is averaged as in FedAvg.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and 4
bytes each way per element of floating-point buffers; 4 D more down until its first answer.
Defaults: kappa 50 and mu 1 of the authors' run script, where D = 512. A feature feels kappa / D:
with other D, kappa = 50 D / 512 is as strong. The defaults in their code and in a library
(kappa 0, mu 0.1) leave no pull.
Evaluation: h(phi; z + b_i); ``recv`` with the global w, ``post`` after local training.
Held-out clients start from w and zbar_g, with b_i = 0.
Deviations: a client too small for a step sends the exact mean of the initial model's features; so
do all, of the trained one, with ``initial_mean=exact``: with mu = 1 zbar_i sees one batch only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedapa_mpi import models, training
from fedapa_mpi.checks import within
from fedapa_mpi.strategies import base, fedavg
from fedapa_mpi.strategies.base import Message, Messages


@dataclass(frozen=True)
class Config:
    """The weights of DBE, and switches that take one of its two parts away."""

    kappa: float = 50.0
    """Weight of the pull of a client's mean feature to the consensus; 0: the bias alone."""
    mu: float = 1.0
    """Weight of the newest batch in the running mean of the features."""
    personal_bias: bool = True
    """false: no bias on the features, the pull alone."""
    initial_mean: Literal["tracked", "exact"] = "tracked"
    """Mean that forms the consensus: the running one (the authors'), or over all samples."""

    def __post_init__(self) -> None:
        within(self, kappa="[0, inf)", mu="(0, 1]")


class Server(fedavg.Server):
    """FedAvg's server, and the consensus zbar_g [D]."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.zbar_g = torch.zeros(models.feature_size(setup.make_model()), device=setup.device)

    def welcome(self, hellos: Messages) -> None:
        """zbar_g = sum_i (n_i / N) zbar_i, once and for all."""
        super().welcome(hellos)
        self.zbar_g.copy_(base.weighted_mean(hellos, "zbar", self.n))
        if not torch.isfinite(self.zbar_g).all():
            raise FloatingPointError("features before round 1 are not finite: lower --lr")

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """w, and zbar_g to those who have not answered yet."""
        for i in ids:
            yield i, super().newcomer() if self.joined[i] else self.newcomer()

    def newcomer(self) -> Message:
        """w and zbar_g."""
        return super().newcomer() | {"zbar": self.zbar_g}

    def notices(self) -> list[str]:
        """Says what is left without the pull."""
        rest = "FedAvg" + " with a personal bias" * self.setup.config.personal_bias
        return [] if self.setup.config.kappa else [f"kappa=0: nothing pulls features, it is {rest}"]


class Follower(fedavg.Client):
    """Trains on cross entropy and follows the mean of its features: the initialisation."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.zbar = torch.zeros(models.feature_size(self.model), device=setup.device)  # [D]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy."""
        z = self.model.extractor(x)
        self.follow(z)
        return F.cross_entropy(self.model.head(z), y)

    def follow(self, z: Tensor) -> Tensor:
        """The running mean [D] after a batch z [B, D]; the gradient flows through that batch."""
        mu = self.setup.config.mu
        zbar = (1 - mu) * self.zbar + mu * z.mean(dim=0)
        self.zbar.copy_(zbar.detach())
        return zbar


class Client(Follower):
    """Trains the global model under its own bias."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.zbar_g = torch.zeros_like(self.zbar)
        self.b = nn.Parameter(torch.zeros_like(self.zbar), setup.config.personal_bias)
        self.optimizer.add_param_group({"params": [self.b], "momentum": 0.0})

    def hello(self) -> Message:
        """n_i, and the mean feature of the initial model after E epochs."""
        initial = Follower(self.setup)
        loss = training.fit(initial, 0)
        if self.setup.config.initial_mean == "exact" or math.isnan(loss):
            own = training.class_means(initial)
            initial.zbar = own["count"].to(own["mean"]) @ own["mean"] / max(self.shard.n, 1)
        return super().hello() | {"zbar": initial.zbar}

    def receive(self, message: Message) -> None:
        """Replaces the model by w, and starts the running mean anew; zbar_g comes once."""
        super().receive(message)
        self.zbar.zero_()
        if "zbar" in message:
            self.zbar_g.copy_(message["zbar"])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy with the bias, and the pull of the mean feature."""
        z = self.model.extractor(x)
        zbar = self.follow(z)
        loss = F.cross_entropy(self.model.head(z + self.b), y)
        kappa = self.setup.config.kappa
        return loss + kappa * (zbar - self.zbar_g).square().mean() / 2 if kappa else loss

    def predict(self, x: Tensor) -> Tensor:
        """Scores [B, C] of h(phi; f(theta; x) + b_i)."""
        return self.model.head(self.model.extractor(x) + self.b)

"""FedALA: each client mixes the global model into its own, element by element, before training.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation
for Personalized Federated Learning", AAAI 2023.

Letters: w [P] the global model, w_i [P] what client i had after its last training, W_i [Q] its
mixing weights in [0, 1] for the top p tensors (the last p of the model, Q elements), eta their
step size, s the share of its training data, in percent, that they learn from.
State: the server keeps w; a client its model, its optimizer, W_i (ones at first) and how often
it has received a model.
Round: w goes down. At the first contact it replaces the model. Later the tensors below the top
are replaced, and the top becomes w_hat = w_i + (w - w_i) * W_i. W_i learns from s % of the data,
drawn anew each time, batch by batch: W_i = clip(W_i - eta g * (w - w_i), 0, 1), with g the gradient
of cross entropy in w_hat, then w_hat is formed again. The first time, passes over that data repeat
until the losses (of the last batch) of the last ``window`` passes have a standard deviation below
``threshold``; later there is one pass. Then E epochs of SGD on all parameters; w_i comes up and
is averaged as in FedAvg.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and 4
bytes each way for each element of the floating-point buffers.
Defaults, the paper's: p = 2, weight and bias of the last layer (there p = 1 layer), s = 80,
eta = 1, threshold 0.01 (the authors' code: 0.1).
Evaluation: ``recv`` is the mixed model before training, the authors' point; ``post`` after it.
Held-out clients start from w: for them it is the first contact.
Deviations: the authors' code mixes at all clients in each round, here only those sampled do. It
knows the first contact by w = w_i in one tensor; here contacts are counted. Its s % are neighbours
in data that may be sorted by class; here they are drawn. Its first phase may never end; here it
does after ``max_passes``, with a warning. Its p = 0 means all tensors. While W_i learns, the model
is in evaluation mode, so that BatchNorm keeps the global statistics.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedapa_mpi import models
from fedapa_mpi.checks import need, within
from fedapa_mpi.strategies import base, fedavg
from fedapa_mpi.strategies.base import Message

log = logging.getLogger("fedapa_mpi")


@dataclass(frozen=True)
class Config:
    """How a client learns what to take from the global model."""

    weight_lr: float = 1.0
    """Step size eta of the mixing weights; 0 leaves them at 1, which is FedAvg."""
    percent: float = 80.0
    """Share s of the training data, in percent, that the mixing weights learn from."""
    top: int = 2
    """Number p of tensors, counted from the model's end, that are mixed."""
    threshold: float = 0.01
    """The first phase ends when the last losses deviate by less."""
    window: int = 10
    """Number of those losses, one from each pass."""
    max_passes: int = 100
    """The first phase ends after so many passes at the latest."""

    def __post_init__(self) -> None:
        within(self, weight_lr="[0, inf)", percent="(0, 100]", top="[1, inf)", threshold="(0, inf]")
        within(self, window="[2, inf)", max_passes="[1, inf)")
        expected = f"at least window, which is {self.window}"
        need(self.max_passes >= self.window, "max_passes", self.max_passes, expected)


class Server(fedavg.Server):
    """FedAvg's server."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        tensors = len(list(setup.make_model().parameters()))
        if setup.config.top > tensors:
            raise ValueError(
                f"top is {setup.config.top}, expected at most {tensors}, which is all tensors of "
                f"this model"
            )

    def notices(self) -> list[str]:
        """Says that without steps everything comes from the global model."""
        if self.setup.config.weight_lr:
            return []
        return ["weight_lr=0: all mixing weights stay 1, this is FedAvg"]


class Client(fedavg.Client):
    """Mixes, then trains as in FedAvg."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.contacts = 0  # models received so far
        self.W = torch.ones(sum(tensor.numel() for tensor in self._top()), device=setup.device)

    def receive(self, message: Message) -> None:
        """Replaces the model by w, and its top by a mixture of w and what it was."""
        own = models.flat(self._top())
        super().receive(message)
        if self.contacts:
            self._mix(own, models.flat(self._top()))
        self.contacts += 1

    def _mix(self, own: Tensor, w: Tensor) -> None:
        """Learns W_i between the tops of w_i and w, both [Q], and leaves w_hat in the model."""
        self.set_mode(training=False)
        own = torch.where(own.isfinite(), own, w)  # a client that diverged begins again
        models.fill(self._top(), torch.lerp(own, w, self.W))  # lerp is exact at 0 and at 1
        if not self.shard.n:
            return
        batches = self._slice()
        losses: list[float] = []  # of the last batch of each pass
        while not self._settled(losses):
            for batch in batches:
                self.setup.poll()
                loss, g = self._gradient(batch)
                self.W.sub_(self.setup.config.weight_lr * g * (w - own)).clamp_(0, 1).nan_to_num_(1)
                models.fill(self._top(), torch.lerp(own, w, self.W))
            losses.append(loss.item())

    def _slice(self) -> tuple[Tensor, ...]:
        """Batches of s % of the training samples, the same in all passes of one contact."""
        setup, n = self.setup, self.shard.n
        order = torch.randperm(n, generator=setup.generator(self.contacts, "slice"))
        count = max(1, int(setup.config.percent * n / 100))
        return order[:count].to(setup.device).split(setup.batch_size)

    def _gradient(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of a batch and its gradient in the top [Q]; the rest is frozen."""
        loss = self.loss(self.shard.x[batch], self.shard.y[batch])
        return loss.detach(), models.flat(torch.autograd.grad(loss, self._top()))

    def _settled(self, losses: list[float]) -> bool:
        """Whether the mixing weights have had enough passes."""
        config, i = self.setup.config, self.setup.client
        if self.contacts > 1:
            return len(losses) == 1
        if len(losses) < config.window:
            return False
        deviation = torch.tensor(losses[-config.window :]).double().std(correction=0).item()
        if not deviation < config.threshold and len(losses) == config.max_passes:  # maybe NaN
            text = "client %d: losses deviate by %.3g after %d passes of the mixing weights: go on"
            log.warning(text, i, deviation, len(losses))
        return deviation < config.threshold or len(losses) == config.max_passes

    def _top(self) -> list[nn.Parameter]:
        return list(self.model.parameters())[-self.setup.config.top :]

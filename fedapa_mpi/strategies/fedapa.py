"""FedAPA: the server learns, by gradient steps, whom each client's extractor is mixed from.

Y. Sun, A. Sun, S. Pan, Z. Fu, J. Guo, "FedAPA: Server-side Gradient-Based Adaptive Personalized
Aggregation for Federated Learning on Heterogeneous Data", IJCAI 2025, pp. 6219-6226,
doi 10.24963/ijcai.2025/692.

Letters: theta_j [P] the extractor that client j sent last, phi_i its head (private), A [M, M] the
weights, row i those of client i; theta_bar_i = sum_j A_ij theta_j what client i gets (Eq. 5);
delta_i = theta_i(new) - theta_bar_i (Eq. 6); g_ij = <theta_j, delta_i>, minus the gradient of
1/2 ||delta_i||^2 in A_ij with theta_i(new) held fixed (Eq. 7); eta its step; s the self weight.

State: the server keeps theta [M, P], A [M, M] float64 and its momentum; a client its model and
optimizer. Only the extractor travels.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: the extractor, with
``share=model`` the whole model), and 4 bytes each way per element of floating-point buffers.

Held-out clients get the uniform mean of the extractors of all clients that have joined.

Where the paper, its algorithm and the authors' code differ:

* Sign. Eq. 7 as printed subtracts eta * g, which raises the very distance that the text sets out
  to lower; the code adds it. ``gradient=descent`` adds, ``printed`` follows the print and keeps
  every neighbour's weight at almost nothing, so that it is local training.
* Self weight and normalisation. Algorithm 1 ends an update with them and takes s = 0.5. The code
  takes s = 1, ends with the clipping and does the rest just before the client's next mixture
  (``postprocess=before_mix``; A is stored un-normalised).
* Momentum. The code steps A by SGD with momentum 0.9 on the whole matrix, so rows of clients that
  did not take part move as well (``row_isolated=false``). The paper has a plain step.
* Order. Algorithm 1 lets the participants work in parallel; the code handles one after the other,
  each mixed from what the ones before it have sent (``--order sequential``).
* Buffers. The code puts BatchNorm statistics and counters into the gradient. Here A mixes the
  statistics, counters stay with the client, and neither enters a gradient.

Our extension, ``gradient=centred``: rows of A sum to 1, so a vector added to every theta_j changes
no mixture, but it does change g. Subtracting the mean over j of g_ij takes that common part out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedapa_mpi import models
from fedapa_mpi.checks import within
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.parts import mixing
from fedapa_mpi.strategies.parts.geometry import blocks


@dataclass(frozen=True)
class Config:
    """The switches of FedAPA; the defaults are the paper's Algorithm 1 with the sign set right."""

    preset: Literal["paper", "official"] = "paper"
    """official: all switches as in the authors' code; single flags still override."""
    gradient: Literal["descent", "printed", "centred"] = "descent"
    """Direction of the step of A: down the distance, as printed in Eq. 7, or our centred form."""
    eta: float = 0.01
    """Step size of A."""
    self_weight: float = 0.5
    """Weight s that a client's own extractor gets before its row is normalised."""
    postprocess: Literal["after_update", "before_mix"] = "after_update"
    """When the self weight is set and the row is normalised."""
    server_momentum: float = 0.0
    """Momentum of the step of A."""
    row_isolated: bool = True
    """With momentum: only rows of clients that took part move."""
    share: Literal["extractor", "model"] = "extractor"
    """What travels and is mixed."""
    adapt: bool = True
    """false: A stays as it is at the start."""
    initial_A: Literal["identity", "uniform"] = "identity"
    """A before round 1."""

    ORDERS: ClassVar = ("parallel", "sequential")
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "official": {
            "self_weight": 1.0,
            "postprocess": "before_mix",
            "server_momentum": 0.9,
            "row_isolated": False,
            "order": "sequential",
            "drop_last": "true",
            "min_train": 129,
            "min_test": 3,
        },
    }
    ONLY_IF: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "gradient": ("adapt", (True,)),
        "eta": ("adapt", (True,)),
        "self_weight": ("adapt", (True,)),
        "postprocess": ("adapt", (True,)),
        "server_momentum": ("adapt", (True,)),
    }

    def __post_init__(self) -> None:
        # with s = 0 a row could sum to 0, and then there is nothing to divide by
        within(self, eta="[0, inf)", self_weight="(0, 1]", server_momentum="[0, 1)")
        if not (self.row_isolated or self.server_momentum):
            raise ValueError("row_isolated=false has no effect without server_momentum above 0")


class Server(base.Server):
    """Algorithm 1, lines 1-14: mixtures down, steps of A up."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        part, M = shared_part(setup.make_model(), setup.config), setup.clients
        self.theta = models.vector(part).repeat(M, 1)  # [M, P]                         line 1
        self.theta_buffers = models.buffers(part).repeat(M, 1)  # [M, Q], mixed but never learned
        self.A = torch.eye(M, dtype=torch.float64, device=setup.device)  # [M, M]     line 2
        if setup.config.initial_A == "uniform":
            self.A.fill_(1 / M)
        self.A_momentum = torch.zeros_like(self.A)

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """theta_bar_i of each client, from one product for the whole round."""
        rows = self._mixing_rows(ids)  # [K, M]                                  line 7, Eq. 5
        yield from mixing.mixtures("theta", ids, rows, self.theta, self.theta_buffers)

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """Steps the rows of all who answered, then stores what they sent."""
        super().aggregate(sent, uploads, t)
        if uploads and self.setup.config.adapt:
            self._step(list(uploads), self._gradient(sent, uploads))
        # last: every row has used the old theta                                         line 8
        mixing.collect("theta", uploads, self.theta, self.theta_buffers)

    def newcomer(self) -> Message:
        """The uniform mean of the extractors of all clients that have joined."""
        return mixing.mean_of_joined("theta", self.joined, self.theta, self.theta_buffers)

    def weights(self) -> Tensor:
        """A [M, M]."""
        return self.A

    def notices(self) -> list[str]:
        """Settings under which this is local training, and what the official preset leaves out."""
        config, notices = self.setup.config, []
        fixed = not config.adapt or config.eta == 0
        if config.gradient == "printed" and not fixed:
            notices.append("gradient=printed steps A away from its neighbours: in effect Local")
        if fixed and config.initial_A == "identity":
            notices.append("A stays the identity: this is local training")
        if config.preset == "official" and self.theta_buffers.numel():
            notices.append("the model's buffers stay out of the gradient, unlike the authors' code")
        return notices

    def _mixing_rows(self, ids: Sequence[int]) -> Tensor:
        """The rows of A as they mix, [K, M]."""
        rows = self.A[list(ids)]
        if self.setup.config.postprocess == "before_mix" and self.setup.config.adapt:
            rows = self._normalised(rows, ids)
        return rows

    def _gradient(self, sent: Messages, uploads: Messages) -> Tensor:
        """The direction of the step for those who answered, [K, M] float64."""
        g = self.A.new_zeros(len(uploads), self.setup.clients)
        for block in blocks(self.theta.shape[1]):
            delta = torch.stack(  # [K, block]                                     line 9, Eq. 6
                [
                    uploads[i]["theta"][block].double() - sent[i]["theta"][block].double()
                    for i in uploads
                ]
            )
            g += delta @ self.theta[:, block].double().T  # <theta_j, delta_i>            Eq. 7
        if self.setup.config.gradient == "printed":
            return -g
        if self.setup.config.gradient == "centred":
            return g - g.mean(dim=1, keepdim=True)
        return g

    def _step(self, ids: list[int], g: Tensor) -> None:
        config = self.setup.config
        rows = ids if config.row_isolated else list(range(self.setup.clients))
        if config.postprocess == "before_mix":
            self.A[ids] = self._mixing_rows(ids)  # the step starts from the row that was mixed
        self.A_momentum[rows] *= config.server_momentum
        self.A_momentum[ids] += g
        self.A[rows] += config.eta * self.A_momentum[rows]  #                    line 10, Eq. 7
        self.A[rows] = self.A[rows].clamp(0, 1)  #                                      line 11
        if config.postprocess == "after_update":
            self.A[rows] = self._normalised(self.A[rows], rows)

    def _normalised(self, rows: Tensor, ids: Sequence[int]) -> Tensor:
        """Self weight set and each row divided by its sum, [K, M]."""
        rows[range(len(ids)), ids] = self.setup.config.self_weight  #                   line 12
        return rows / rows.sum(dim=1, keepdim=True)  #                                  line 13


class Client(base.Client):
    """Algorithm 1, lines 17-28: mixed extractor in, own head, joint training, extractor out."""

    def receive(self, message: Message) -> None:
        """Replaces the extractor by theta_bar_i; the head phi_i stays."""
        models.install(shared_part(self.model, self.setup.config), "theta", message)

    def upload(self) -> Message:
        """theta_i after training."""
        return models.outgoing(shared_part(self.model, self.setup.config), "theta")


def shared_part(model: models.SplitModel, config: Config) -> nn.Module:
    """What travels: the extractor, or with ``share=model`` everything."""
    return model if config.share == "model" else model.extractor

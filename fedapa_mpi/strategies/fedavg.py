"""FedAvg: one global model, the mean of the clients' models weighted by sample counts.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning
of Deep Networks from Decentralized Data", AISTATS 2017.

State: the server keeps w [P] and the floating-point buffers; a client its optimizer and the
model it holds.
Round: w goes down; E epochs of SGD on all parameters; w_i comes up; then
w = sum_i (n_i / sum n) w_i over those who answered, unchanged if nobody did. Floating-point
buffers (BatchNorm statistics) are averaged alike, integer counters stay with the client.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: all parameters), and
4 bytes each way for each element of the floating-point buffers.
Held-out clients start from w.
Evaluation: ``recv`` is the global model, ``post`` the model after local training. Public codes
compare FedAvg's ``recv`` with other methods' ``post``; both are reported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedapa_mpi import models
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages


@dataclass(frozen=True)
class Config:
    """No flags of its own."""


class Server(base.Server):
    """Holds the global model w [P]."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        model = setup.make_model()
        self.w = models.vector(model)  # [P]
        self.w_buffers = models.buffers(model)

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The same w for everyone."""
        for i in ids:
            yield i, self.newcomer()

    def newcomer(self) -> Message:
        """w, as everyone gets it."""
        return models.packed("w", self.w, self.w_buffers)

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """w = sum_i (n_i / sum n) w_i."""
        super().aggregate(sent, uploads, t)
        if uploads:
            base.average(uploads, self.n, "w", self.w, self.w_buffers)


class Client(base.Client):
    """Trains the global model on its own data."""

    def receive(self, message: Message) -> None:
        """Replaces the whole model by w."""
        models.install(self.model, "w", message)

    def upload(self) -> Message:
        """w_i after training."""
        return models.outgoing(self.model, "w")

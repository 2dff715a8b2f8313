"""FedGH: the server trains one head for all on the mean features of the clients' classes.

L. Yi, G. Wang, X. Liu, Z. Shi, H. Yu, "FedGH: Heterogeneous Federated Learning with Generalized
Global Header", ACM Multimedia 2023, arXiv 2303.13137.

Letters: theta_i the extractor of client i, D its features, phi [Q] the head; r_ic [D] the mean
feature of client i's samples of class c, it owns m_i classes; CE cross entropy.
State: the server keeps phi and its optimizer; a client its model and its optimizer.
Round: phi goes down and replaces the client's head; E epochs of SGD on theta_i and the head, on
CE; r_ic of the trained theta_i come up with their classes c. theta_i never leaves the client, and
neither does the trained head: the next download replaces it. The server then makes one SGD step
on CE(h(phi; r_ic), c) for every pair, by client and then by class, whatever the number of samples
behind it. Without a pair phi stays as it is.
Traffic per sampled client and round: 4 Q bytes down, (4 D + 8) m_i up (float32, int64 class ids),
and 4 bytes down for each element of floating-point buffers of the head.
Defaults: server_lr 0.01 and server_momentum 0.9, what the authors set; the paper's formula is a
plain step. The order of pairs is the authors' and changes the result.
Evaluation: theta_i with phi is ``recv``, with the head trained on the client ``post``. The authors
report ``post`` of the sampled clients.
Held-out clients start from the common initial extractor and phi.

Deviations. This is the paper's method. The authors' code steps the optimizer of the client network
where it should step the header's, so its header keeps its random start for ever. It also averages
means of batches, so that a sample in a small batch counts more; r_ic here is the mean over all
training samples, in evaluation mode. Its weight decay 0.001 and clipping at 50 are left out.
Classes that no participant owns are only pushed away and fade; nothing is remembered for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.nn import functional as F

from fedapa_mpi import models, training
from fedapa_mpi.checks import within
from fedapa_mpi.sgd import SGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages


@dataclass(frozen=True)
class Config:
    """How the server trains the head."""

    server_lr: float = 0.01
    """Learning rate of the head at the server."""
    server_momentum: float = 0.9
    """Momentum of the head at the server; its buffers live as long as the run."""

    def __post_init__(self) -> None:
        within(self, server_lr="[0, inf)", server_momentum="[0, 1)")


class Server(base.Server):
    """Holds and trains the global head phi."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.head = setup.make_model().head
        self.optimizer = SGD(
            self.head.parameters(),
            lr=setup.config.server_lr,
            momentum=setup.config.server_momentum,
        )

    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """The same phi for everyone."""
        for i in ids:
            yield i, self.newcomer()

    def newcomer(self) -> Message:
        """phi, as everyone gets it."""
        return models.outgoing(self.head, "head")

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """One step for each pair (mean feature, class), in client and then class order."""
        super().aggregate(sent, uploads, t)
        self.head.eval()  # one pair has no batch statistics
        for upload in uploads.values():
            for mean, c in zip(upload["mean"], upload["ids"]):
                self.optimizer.zero_grad()
                F.cross_entropy(self.head(mean[None])[0], c).backward()
                self.optimizer.step()

    def notices(self) -> list[str]:
        """Whether the head is trained at all."""
        off = "server_lr=0: the server's head stays as it was at random"
        return [] if self.setup.config.server_lr else [off]


class Client(base.Client):
    """Trains its own extractor under the global head."""

    def receive(self, message: Message) -> None:
        """Replaces the head by phi; the extractor stays."""
        models.install(self.model.head, "head", message)

    def upload(self) -> Message:
        """Mean features [m_i, D] of the classes it owns, and class ids [m_i]."""
        own = training.class_means(self)
        return {"mean": own["mean"], "ids": own["ids"]}

"""pFedHN: a hypernetwork at the server makes each client's model from the client's embedding.

A. Shamsian, A. Navon, E. Fetaya, G. Chechik, "Personalized Federated Learning using
Hypernetworks", ICML 2021.

Letters: v_i [e] the embedding of client i, psi the other parameters of the hypernetwork HN,
w_i = HN(v_i; psi) [P] what is generated, w~_i the same after local training. HN is Linear(e, H),
n_h times ReLU and Linear(H, H), then Linear(H, P): one linear map for each tensor of the model.
State: the server keeps HN, embeddings included, and its optimizer; a client its model and its
optimizer. HN has about (H + 1) P parameters and is never sent.
Round: w_i goes down; E epochs of SGD on cross entropy, gradient clipped to norm 50; w~_i comes up.
delta_i = w_i - w~_i, received minus trained, is the gradient of 1/2 ||HN(v_i) - w~_i||^2 in
HN(v_i); it is pulled back to psi and v_i through the graph of HN, made again with unchanged psi.
Then one step per client in turn (``--order sequential``), or one along the mean over all who
answered (``parallel``): clipped to norm 50, SGD with momentum and weight decay. Sample counts play
no role. ``share=extractor`` is the paper's pFedHN-PC with a private head.
Traffic per sampled client and round: 4 P bytes down, 4 P up (float32; P: parameters generated).
Defaults, the authors': ``--order sequential``, e = 1 + floor(M / 4), H = 100, n_h = 3, step 0.01,
momentum 0.9, decay 0.001, fresh client momentum each round (``--client_opt reset``): carried over
from another model it enters delta, and on the digits that diverges.
Evaluation: ``recv`` is the generated model, the authors' point; ``post`` after local training.
Held-out clients: not available, as they have no embedding.
Deviations: clients train as with any strategy (authors: 50 batches at 0.005, weight decay 5e-5, and
5000 steps in all). ``parallel`` trains the clients of a round at once, but is one step where they
take K: ``recv`` 0.27, not 0.97, after 40 rounds on 5 % of Fashion-MNIST, two classes per client.
As theirs, the step is dense: momentum and decay move embeddings of clients that took no part.
Buffers (BatchNorm) stay with the client. On the sign of delta in the paper: FAULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedapa_mpi import models, streams
from fedapa_mpi.checks import within
from fedapa_mpi.sgd import ClippedSGD
from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message, Messages
from fedapa_mpi.strategies.fedapa import shared_part


@dataclass(frozen=True)
class Config:
    """The hypernetwork and its optimizer."""

    share: Literal["model", "extractor"] = "model"
    """What is generated: the whole model, or the extractor below a private head (pFedHN-PC)."""
    embedding: int | None = None
    """Size e of an embedding; default 1 + M / 4, rounded down."""
    hidden: int = 100
    """Width H of the hypernetwork."""
    hidden_layers: int = 3
    """Number n_h of its layers between the first and the last."""
    hn_lr: float = 0.01
    """Learning rate of hypernetwork and embeddings."""
    hn_momentum: float = 0.9
    """Momentum of hypernetwork and embeddings."""
    hn_decay: float = 1e-3
    """Weight decay of hypernetwork and embeddings."""
    clip: float = 50.0
    """Largest norm of a gradient, at the server and at a client."""

    ORDERS: ClassVar = ("parallel", "sequential")
    PRESETS: ClassVar = {"paper": {"client_opt": "reset", "order": "sequential"}}

    def __post_init__(self) -> None:
        within(self, embedding="[1, inf)", hidden="[1, inf)", hidden_layers="[0, inf)")
        within(self, hn_lr="[0, inf)", hn_decay="[0, inf)", hn_momentum="[0, 1)", clip="(0, inf]")


class Server(base.Server):
    """Generates models and learns from what training makes of them."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        config = setup.config
        P = models.vector(shared_part(setup.make_model(), config)).numel()
        with streams.seeded(setup.seed, streams.SERVER, 0, "hypernetwork"):
            self.hypernetwork = Hypernetwork(config, setup.clients, P).to(setup.device)
        self.optimizer = ClippedSGD(
            self.hypernetwork.parameters(),
            config.clip,
            lr=config.hn_lr,
            momentum=config.hn_momentum,
            weight_decay=config.hn_decay,
        )

    @torch.no_grad()
    def download(self, ids: Sequence[int], t: int) -> Iterator[tuple[int, Message]]:
        """w_i of each client."""
        yield from ((i, {"w": w}) for i, w in zip(ids, self.hypernetwork(ids), strict=True))

    def aggregate(self, sent: Messages, uploads: Messages, t: int) -> None:
        """One step of the hypernetwork towards what the clients that answered made of w_i."""
        super().aggregate(sent, uploads, t)
        if not uploads:
            return  # a step would still decay weights
        delta = torch.stack([sent[i]["w"] - uploads[i]["w"] for i in uploads])  # [K, P]
        self.optimizer.zero_grad()
        self.hypernetwork(list(uploads)).backward(delta / len(uploads))
        self.optimizer.step()

    def notices(self) -> list[str]:
        """Settings under which nothing is learned, or the wrong thing."""
        still = "hn_lr=0: nothing is learned, clients get the same models every round"
        misled = "client_opt=persist: momentum of earlier models misleads the server"
        persist = [misled] * (self.setup.client_opt == "persist" and self.setup.momentum > 0)
        return persist if self.setup.config.hn_lr else [still, *persist]


class Client(base.Client):
    """Trains what was generated for it."""

    def __init__(self, setup: base.Setup) -> None:
        super().__init__(setup)
        self.optimizer = ClippedSGD(
            self.model.parameters(), setup.config.clip, lr=setup.lr, momentum=setup.momentum
        )

    def receive(self, message: Message) -> None:
        """Replaces the generated part by w_i."""
        models.set_vector(shared_part(self.model, self.setup.config), message["w"])

    def upload(self) -> Message:
        """w~_i, after training."""
        return {"w": models.vector(shared_part(self.model, self.setup.config))}


class Hypernetwork(nn.Module):
    """Embeddings of M clients and the network that turns one into P numbers."""

    def __init__(self, config: Config, clients: int, P: int) -> None:
        super().__init__()
        e, H = config.embedding or 1 + clients // 4, config.hidden
        self.embedding = nn.Embedding(clients, e)  # V
        self.layers = nn.Sequential(nn.Linear(e, H))
        for _ in range(config.hidden_layers):
            self.layers.extend([nn.ReLU(), nn.Linear(H, H)])
        self.layers.append(nn.Linear(H, P))

    def forward(self, ids: Sequence[int]) -> Tensor:
        """w [K, P] of K clients."""
        rows = torch.tensor(list(ids), dtype=torch.int64, device=self.embedding.weight.device)
        return self.layers(self.embedding(rows))

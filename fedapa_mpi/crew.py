"""The clients that live in one process, and what they have to say of a round."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fedapa_mpi import streams, training
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import Message
from fedapa_mpi.comm.orders import Order
from fedapa_mpi.failing import Place
from fedapa_mpi.store.state import State, copy_of
from fedapa_mpi.strategies.base import Client

SCORES = ("recv", "post", "held")  # columns of a report, [k, V, 3] each


class Crew:
    """Lets clients take part, measures them, and can undo the round that is under way.

    Args:
        clients: by id.
        members: how many clients the federation has; ids from there on are held out.
        seed: of the run; the streams of a client's own random numbers start from it.
        device: where the clients are.
        clock: charged with ``compute`` and ``evaluation``.
        place: kept up to date, for error messages.
    """

    def __init__(
        self,
        clients: Mapping[int, Client],
        members: int,
        seed: int,
        device: torch.device,
        clock: Clock,
        place: Place,
    ) -> None:
        self.clients = dict(sorted(clients.items()))
        self.members = {i: client for i, client in self.clients.items() if i < members}
        self._seed, self._device, self._clock, self._place = seed, device, clock, place
        self._ways = 1 + max((len(c.ALSO) for c in clients.values()), default=0)
        self._before: dict[int, State] = {}
        self._rows: dict[int, dict[str, Tensor]] = {}

    def hello(self, i: int) -> Message:
        """What a client tells the server before round 1."""
        with self._clock.span("compute"), self._streams(i, 0, "hello"):
            return self.clients[i].hello()

    def begin(self, t: int) -> None:
        """Round t begins: what the last one left behind can no longer be undone."""
        self._place.round = t
        self._before.clear()
        self._rows.clear()

    def mine(self, ids: Iterable[int]) -> list[int]:
        """Those of the clients that live here, in the same order."""
        return [i for i in ids if i in self.clients]

    def participate(self, i: int, message: Message, order: Order) -> Message:
        """receive -> (evaluate) -> train -> (evaluate) -> upload, of one sampled client."""
        client, t = self.clients[i], order.round
        self._before[i] = copy_of(client.state_dict())
        self._receive(i, message, t)
        if "recv" in order.points:
            self._note(i, "recv", self._score(i, t))
        self._train(i, t)
        if "post" in order.points:
            self._note(i, "post", self._score(i, t))
        with self._clock.span("compute"), self._streams(i, t, "upload"):
            return client.upload()

    def evaluate_held(self, i: int, t: int) -> None:
        """Scores an unsampled client with the model it holds."""
        self._note(i, "held", self._score(i, t))

    def evaluate_delivered(self, i: int, message: Message, t: int) -> None:
        """Scores an unsampled client with what the server would send it, then puts it back."""
        self._before[i] = copy_of(self.clients[i].state_dict())
        self._receive(i, message, t)
        self._note(i, "recv", self._score(i, t))
        self.clients[i].load_state_dict(self._before[i])

    def try_newcomer(self, i: int, message: Message, t: int) -> None:
        """Lets a held-out client start from a delivery and train once, then puts it back."""
        self._before[i] = copy_of(self.clients[i].state_dict())
        self._receive(i, message, t)
        self._note(i, "recv", self._score(i, t))
        self._train(i, t)
        self._note(i, "post", self._score(i, t))
        self.clients[i].load_state_dict(self._before[i])

    def undo(self) -> None:
        """Puts every client back to where it was before the round."""
        for i, state in self._before.items():
            self.clients[i].load_state_dict(state)
        self._before.clear()

    def report(self) -> Message:
        """The round's losses and scores: ``client`` [k] and a row of each column per client.

        A score is (correct, samples, summed loss) for each of V ways of answering; NaN stands
        for not measured.
        """
        ids = sorted(self._rows)
        nothing = torch.full((), torch.nan, dtype=torch.float64)
        message = {"client": torch.tensor(ids, dtype=torch.int64)}
        for column in ("loss", *SCORES):
            shape = () if column == "loss" else (self._ways, 3)
            rows = [self._rows[i].get(column, nothing).expand(shape) for i in ids]
            message[column] = torch.stack(rows) if rows else nothing.new_empty((0, *shape))
        return message

    def identity(self) -> dict[str, int]:
        """Who trains here: process id and device (-1: the CPU, else the GPU's number)."""
        index = self._device.index or 0
        return {"pid": os.getpid(), "device": index if self._device.type == "cuda" else -1}

    def _receive(self, i: int, message: Message, t: int) -> None:
        here = {name: tensor.to(self._device) for name, tensor in message.items()}
        with self._clock.span("compute"), self._streams(i, t, "receive"):
            self.clients[i].receive(here)

    def _train(self, i: int, t: int) -> None:
        with self._clock.span("compute"), self._streams(i, t, "train"):
            self._note(i, "loss", torch.tensor(self.clients[i].train(t), dtype=torch.float64))

    def _score(self, i: int, t: int) -> Tensor:
        with self._clock.span("evaluation"), self._streams(i, t, "evaluate"):
            return training.evaluate(self.clients[i])

    def _note(self, i: int, column: str, value: Tensor) -> None:
        self._rows.setdefault(i, {})[column] = value

    @contextmanager
    def _streams(self, i: int, t: int, purpose: str) -> Iterator[None]:
        self._place.client = i
        with streams.seeded(self._seed, i, t, purpose, self._device):
            yield
        self._place.client = None

"""Local-only: every sampled client trains its own model, nothing is sent.

State: the server keeps none; a client its model and its optimizer.
Round: a sampled client trains E epochs on cross entropy. ``--join_low 1`` lets every client
train in every round; the default trains as often as the other strategies do.
Held-out clients start from the common initial model.
Traffic per sampled client and round: 0 bytes down, 0 up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedapa_mpi.strategies import base
from fedapa_mpi.strategies.base import Message


@dataclass(frozen=True)
class Config:
    """No flags of its own."""


class Server(base.Server):
    """Sends empty messages: they only say whose turn it is."""

    def newcomer(self) -> Message:
        """Nothing: the newcomer trains its initial model."""
        return {}


class Client(base.Client):
    """Trains and keeps its model."""

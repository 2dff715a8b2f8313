"""Counts the method's traffic: bytes of tensors, per client and direction."""

from __future__ import annotations

import numpy as np

from fedapa_mpi.comm.messages import Envelope, Kind


class Traffic:
    """Bytes of downloads and uploads of M clients since the last ``take``.

    Headers, padding, start-up, checkpoints and deliveries for evaluation only do not count.
    """

    def __init__(self, clients: int) -> None:
        self._bytes = np.zeros((2, clients), dtype=np.int64)

    def count(self, envelope: Envelope) -> None:
        """Adds a message, if it is one of the method's."""
        if envelope.kind is Kind.DOWNLOAD:
            self._bytes[0, envelope.client] += envelope.payload
        elif envelope.kind is Kind.UPLOAD:
            self._bytes[1, envelope.client] += envelope.payload

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes down [M] and up [M] since the last call, int64."""
        taken, self._bytes = self._bytes, np.zeros_like(self._bytes)
        return taken[0], taken[1]

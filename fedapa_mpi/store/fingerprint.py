"""The fingerprint of a run: one sha256 over all that must not depend on the layout."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from fedapa_mpi.store.results import Rows
from fedapa_mpi.store.state import State


def comparable(rows: Rows) -> Rows:
    """Return the part of `Results.rows` that depends neither on layout nor on time."""
    names = ("round", "sampled", "answered", "loss", "bytes/", "test_loss/")
    return {
        name: rows[name]
        for name in rows
        if name.startswith(names) or (name.startswith("accuracy/") and name.endswith("/client"))
    }


class Fingerprint:
    """sha256 of a run's outcome, fed in this order: server, clients by ascending id, metrics.

    Covers names, types, shapes and bytes; names count in alphabetical order.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._position = (-1, 0)

    def server(self, state: State) -> "Fingerprint":
        """Take in the server's state."""
        return self._state(0, 0, state)

    def client(self, client: int, state: State) -> "Fingerprint":
        """Take in one client's state. Raises ValueError if its turn is over."""
        return self._state(1, client, state)

    def metrics(self, metrics: Mapping[str, np.ndarray]) -> "Fingerprint":
        """Take in arrays of numbers, as float64 in which any NaN is the same NaN."""
        values = {name: np.array(metrics[name], np.float64) for name in metrics}
        for value in values.values():
            value[np.isnan(value)] = np.nan
        return self._state(2, 0, {name: torch.from_numpy(values[name]) for name in values})

    def hexdigest(self) -> str:
        """Return the 64 hexadecimal digits of what was taken in so far."""
        return self._sha.hexdigest()

    def _state(self, part: int, client: int, state: State) -> "Fingerprint":
        if (part, client) <= self._position:
            raise ValueError(
                f"fingerprint: (part, client) {(part, client)} after {self._position}; expected "
                "the server, then clients by ascending id, then the metrics, each once"
            )
        self._position = (part, client)
        self._sha.update(json.dumps([part, client, len(state)]).encode())
        for name in sorted(state):
            tensor = state[name].detach().cpu().contiguous()
            self._sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            self._sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return self


def fingerprint(server: State, clients: Iterable[State], metrics: Mapping[str, np.ndarray]) -> str:
    """Return the Fingerprint of states in client order and of metrics."""
    digest = Fingerprint().server(server)
    for client, state in enumerate(clients):
        digest.client(client, state)
    return digest.metrics(metrics).hexdigest()

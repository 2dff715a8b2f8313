"""Which score each client counts with: the sampled ones' own, the others' last known."""

from __future__ import annotations

import torch
from torch import Tensor

from fedapa_mpi.comm.messages import Message
from fedapa_mpi.comm.orders import Order
from fedapa_mpi.store.state import Stateful


class Scoreboard(Stateful):
    """Remembers the score of the model that each client holds, so that it is measured once.

    A score is (correct, samples, summed loss) for each of V ways of answering, float64 [V, 3];
    NaN means not available.
    """

    def __init__(self, clients: int, ways: int = 1) -> None:
        self.held = torch.full((clients, ways, 3), torch.nan, dtype=torch.float64)  # [M, V, 3]
        self.known = torch.zeros(clients, dtype=torch.bool)  # [M] held is of the present model

    def unknown(self, others: list[int]) -> tuple[int, ...]:
        """Those of the unsampled clients whose model changed since it was last measured."""
        return tuple(i for i in others if not self.known[i])

    def enter(self, order: Order, report: Message) -> dict[str, Tensor]:
        """Takes a round's scores; gives ``recv`` and ``post`` of every client, [M, V, 3] each.

        NaN rows for points that this round does not evaluate.
        """
        rows = dict(zip(report["client"].tolist(), range(len(report["client"])), strict=True))
        for i in order.held:
            self._hold(i, report["held"][rows[i]])
        scores = {point: self.held.clone() for point in ("recv", "post")}
        for i in (*order.answering(order.clients), *order.delivered):
            for point in scores:
                source = "recv" if i in order.delivered else point
                scores[point][i] = report[source][rows[i]]
        for i in order.answering(order.clients):
            self._hold(i, report["post"][rows[i]], "post" in order.points)
        unmeasured = torch.full_like(self.held, torch.nan)
        return {p: s if p in order.points else unmeasured for p, s in scores.items()}

    def _hold(self, i: int, score: Tensor, known: bool = True) -> None:
        self.held[i] = score
        self.known[i] = known

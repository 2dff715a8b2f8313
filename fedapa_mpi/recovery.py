"""Does A know who belongs together? Compares its weights with what is known of the clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Truth:
    """Which clients belong together: those ``what``."""

    what: str  # "with the same classes" or "of the same group"
    same: np.ndarray  # [M, M] bool

    def of_first(self, clients: int) -> Truth:
        """The truth about the first clients."""
        return Truth(self.what, self.same[:clients, :clients])


@dataclass(frozen=True)
class Recovery:
    """How the off-diagonal weights of A tell pairs that belong together from all others.

    auc: probability that such a pair has the larger weight; inside, outside: mean weights.
    """

    auc: float
    inside: float
    outside: float


def blocks(labels: np.ndarray) -> np.ndarray:
    """Which clients hold the same classes, [M, M] bool, from class counts [M, C]."""
    _, block = np.unique(labels > 0, axis=0, return_inverse=True)
    return alike(block.reshape(-1))  # numpy 2.0.0 gives [M, 1]


def alike(group: np.ndarray) -> np.ndarray:
    """Which clients have the same number, [M, M] bool, from one number each [M]."""
    return group[:, None] == group[None, :]


def recovery(A: np.ndarray, same: np.ndarray) -> Recovery | None:
    """Scores A [M, M] against the truth ``same`` [M, M]; None if all pairs are alike."""
    from sklearn.metrics import roc_auc_score  # takes a second to import

    off_diagonal = ~np.eye(len(A), dtype=bool)
    weight, truth = A[off_diagonal], same[off_diagonal]
    if truth.all() or not truth.any():
        return None
    return Recovery(
        float(roc_auc_score(truth, weight)),
        float(weight[truth].mean()),
        float(weight[~truth].mean()),
    )

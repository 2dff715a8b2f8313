"""Does A know who belongs together? Compares its weights with clients that share classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Recovery:
    """How the off-diagonal weights of A tell pairs of the same block from all others.

    auc: probability that a same-block pair has the larger weight; inside, outside: mean weights.
    """

    auc: float
    inside: float
    outside: float


def blocks(labels: np.ndarray) -> np.ndarray:
    """Which clients hold the same classes, [M, M] bool, from class counts [M, C]."""
    held = labels > 0
    return (held[:, None, :] == held[None, :, :]).all(axis=2)


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

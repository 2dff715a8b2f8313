"""Distances between the models of many clients, in float64 and in little memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

COLUMNS = 1 << 15  # parameters that are float64 at a time


def blocks(P: int) -> Iterator[slice]:
    """Cuts P parameters into blocks."""
    yield from (slice(start, start + COLUMNS) for start in range(0, P, COLUMNS))


def squared_distances(w: Tensor) -> Tensor:
    """||w_i - w_j||^2 [M, M] float64 for models w [M, P]; exactly 0 where models are equal."""
    d = w.new_zeros(len(w), len(w), dtype=torch.float64)
    for block in blocks(w.shape[1]):  # differences, not products, so that 0 is exact
        part = w[:, block].double()
        d += torch.cdist(part, part, compute_mode="donot_use_mm_for_euclid_dist").square()
    return d


def cosines(w: Tensor) -> Tensor:
    """cos(w_i, w_j) [M, M] float64 for models w [M, P]; 0 beside a model of zeros."""
    d = squared_distances(torch.cat([torch.zeros_like(w[:1]), w]))  # row 0: from the origin
    norm = d[0, 1:].sqrt().clamp_min(1e-30)
    return (d[0, 1:] + d[1:, :1] - d[1:, 1:]) / 2 / norm / norm[:, None]

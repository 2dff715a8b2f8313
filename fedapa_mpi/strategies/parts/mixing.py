"""Mixtures of what all clients sent last: FedAPA's and FedAMP's.

The collection is two tensors: parameters [M, P] and floating-point buffers [M, Q], Q maybe 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fedapa_mpi import models
from fedapa_mpi.strategies.base import Message, Messages


def mixtures(
    name: str, ids: Sequence[int], rows: Tensor, values: Tensor, buffers: Tensor
) -> Iterator[tuple[int, Message]]:
    """(i, message) of each client in ``ids``, by its row of weights in ``rows`` [K, M]."""
    mixed, buffers_mixed = rows.to(values) @ values, rows.to(buffers) @ buffers
    for k, i in enumerate(ids):
        yield i, models.packed(name, mixed[k], buffers_mixed[k])


def mean_of_joined(name: str, joined: Tensor, values: Tensor, buffers: Tensor) -> Message:
    """The uniform mean over clients that have joined, or over all while none has."""
    part = joined if joined.any() else ~joined
    return models.packed(name, values[part].mean(dim=0), buffers[part].mean(dim=0))


def collect(name: str, uploads: Messages, values: Tensor, buffers: Tensor) -> None:
    """Takes uploads in place of what those clients sent before."""
    for i, upload in uploads.items():
        values[i] = upload[name]
        if buffers.numel():
            buffers[i] = upload[f"{name}_buffers"]

"""Global prototypes: a mean feature for each class, and which classes have one.

The table is two tensors, proto [C, D] and known [C] bool; these functions change them in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedapa_mpi import models
from fedapa_mpi.strategies.base import Message, Messages, Setup


def table(setup: Setup) -> tuple[Tensor, Tensor]:
    """proto and known while no class has a prototype."""
    shape = setup.classes, models.feature_size(setup.make_model())
    known = torch.zeros(setup.classes, dtype=torch.bool, device=setup.device)
    return torch.zeros(shape, device=setup.device), known


def outgoing(proto: Tensor, known: Tensor) -> Message:
    """The m known prototypes [m, D] with their classes [m]."""
    return {"proto": proto[known], "ids": known.nonzero()[:, 0]}


def install(proto: Tensor, known: Tensor, message: Mapping[str, Tensor]) -> None:
    """Replaces all of a table by what ``outgoing`` gave."""
    proto.zero_()[message["ids"]] = message["proto"]
    known.zero_()[message["ids"]] = True


def average(proto: Tensor, known: Tensor, uploads: Messages, weighted: bool) -> None:
    """proto_c = sum_i (n_ic / N_c) mean_ic over the owners of c; a class without any keeps its own.

    In client order, weights formed first. Uploads have "mean" [m, D], "ids" [m] and "count" [m].

    Args:
        weighted: by samples n_ic of the class; otherwise all owners count the same.
    """
    count = {i: u["count"] if weighted else u["count"].clamp(max=1) for i, u in uploads.items()}
    N = torch.zeros_like(known, dtype=torch.int64)  # [C]
    for i, upload in uploads.items():
        N[upload["ids"]] += count[i]
    proto[N > 0] = 0
    known |= N > 0
    for i, upload in uploads.items():
        weight = (count[i].double() / N[upload["ids"]]).float()
        proto[upload["ids"]] += weight[:, None] * upload["mean"]

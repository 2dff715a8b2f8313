"""APPLE's relationships: how long they are held at their start, and whose cores they ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedapa_mpi import streams
from fedapa_mpi.strategies.base import Setup


def relaxation(r: int, L: float, schedule: str) -> float:
    """lambda(r), the hold of the regulariser: 1 at r = 0, 0 from L on."""
    if r >= L:
        return 0.0
    return (math.cos(math.pi * r / L) + 1) / 2 if schedule == "cosine" else 1e-3 ** (r / L)


def most(setup: Setup) -> int:
    """How many core models a client downloads in a round."""
    others = setup.clients - 1
    return min(setup.config.downloads, others) or others


def limited(setup: Setup) -> bool:
    """Whether a client gets fewer than all others' core models."""
    return most(setup) < setup.clients - 1


def first(setup: Setup) -> Tensor:
    """[M, M] bool: row i says whose cores client i gets at its first download, drawn at random."""
    wanted = torch.zeros(setup.clients, setup.clients, dtype=torch.bool, device=setup.device)
    for i, row in enumerate(wanted):
        order = torch.randperm(
            setup.clients, generator=streams.generator(setup.seed, i, 0, "wanted")
        )
        row[order[order != i][: most(setup)]] = True
    return wanted


def following(setup: Setup, had: Tensor, p: Tensor, t: int) -> Tensor:
    """[M] bool: whose cores client i asks for in round t, by what it has had and how it mixes.

    First those that it never had, then drawn from all others with probability ~ base^|p_ij|,
    base = max(1.5, m t / M), m the limit.

    Args:
        had: [M] bool, the client's own included.
        p: [M], its relationships.
    """
    draw, m = setup.generator(t, "wanted"), most(setup)
    new = (~had).cpu().nonzero()[:, 0]
    new = new[torch.randperm(len(new), generator=draw)][:m]
    strength = p.abs().double().cpu()
    base = max(1.5, m * t / setup.clients)
    chance = (base ** (strength - strength.max())).nan_to_num(1.0).clamp_min(1e-30)
    chance[new] = chance[setup.client] = 0
    wanted = torch.zeros_like(had)
    wanted[new] = True
    if len(new) < m:
        wanted[torch.multinomial(chance, m - len(new), generator=draw)] = True
    return wanted

"""A problem whose gradients can be worked on paper: two logits, one input that is always 1.

The model is its 2 parameters w = (a, b), the logits; it starts at (0, 0). The gradient of the
cross entropy for label 0 is (s - 1, 1 - s) with s = 1 / (1 + exp(b - a)), and the negative of
(-s, s) for label 1: at the start (-0.5, 0.5) for label 0 and (0.5, -0.5) for label 1. So w stays
of the form (v, -v), and s = 1 / (1 + exp(-2 v)).
"""

from collections.abc import Sequence

import torch
from tiny import make_setup, shard
from torch import nn

from fedapa_mpi import strategies
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel
from fedapa_mpi.strategies.base import Client, Server


def logits_model() -> SplitModel:
    """w = (a, b), from (0, 0)."""
    model = SplitModel(nn.Identity(), nn.Linear(1, 2, bias=False))
    nn.init.zeros_(model.head.weight)
    return model


def ones(label: int, n: int) -> Shard:
    """n times the input 1 with one label."""
    x, y = torch.ones(n, 1), torch.full((n,), label)
    return Shard(x, y, x, y, 2, scale=1.0, mean=(0.0,), std=(1.0,))


def parties(
    strategy: str, config: object, labels: Sequence[int], n: Sequence[int], **changes: object
) -> tuple[Server, dict[int, Client]]:
    """A server and clients with one label each, which take one plain step of 0.1 a round."""
    module = strategies.load(strategy)
    shared = {
        "clients": len(labels),
        "architecture": logits_model,
        "momentum": 0.0,
        "batch_size": 64,
        **changes,
    }
    server = module.Server(make_setup(config, **shared))
    clients = {
        i: module.Client(make_setup(config, client=i, shard=ones(label, count), **shared))
        for i, (label, count) in enumerate(zip(labels, n))
    }
    server.welcome({i: client.hello() for i, client in clients.items()})
    return server, clients


def poor_shards() -> list[Shard]:
    """No sample at all, a single one, one class only, no test sample, and a usual shard."""
    return [shard(0, 0), shard(1, 1), _one_class(), shard(9, 0, seed=3), shard(14, 6, seed=4)]


def _one_class() -> Shard:
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
    y = torch.ones(7, dtype=torch.int64)
    return Shard(x, y, x, y, 3, scale=1.0, mean=(0.0,), std=(1.0,))

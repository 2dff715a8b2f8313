"""One feature, two scores, no bias: whole rounds of such a model can be worked by hand.

Features are z = a x with a = 1 at first, scores z (phi_0, phi_1) with phi = 0 at first. As long as
phi is 0, cross entropy gives a no gradient, and phi_c a gradient of (1/2 - [y = c]) z.
"""

from dataclasses import replace

import torch
from tiny import make_setup, train_round
from torch import nn

from fedapa_mpi import strategies
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel


def line_model() -> SplitModel:
    """a = 1, phi = (0, 0)."""
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    nn.init.ones_(model.extractor.weight)
    nn.init.zeros_(model.head.weight)
    return model


def line_shard(x, y, classes=2) -> Shard:
    """Samples x with labels y, the same for training and test."""
    samples = torch.tensor(x, dtype=torch.float32).reshape(-1, 1)
    labels = torch.tensor(y, dtype=torch.int64)
    return Shard(samples, labels, samples, labels, classes, scale=1.0, mean=(0.0,), std=(1.0,))


def line_parties(strategy, data, classes=2, **switches):
    """A server that has welcomed a client for each (x, y), and these; steps of 0.1, E = 1.

    A batch holds all samples of a client.
    """
    module = strategies.load(strategy)
    common = {"clients": len(data), "architecture": line_model, "momentum": 0.0, "batch_size": 99}
    setup = replace(make_setup(module.Config(**switches), **common), classes=classes)
    server = module.Server(setup)
    clients = {
        i: module.Client(replace(setup, client=i, shard=line_shard(x, y, classes)))
        for i, (x, y) in enumerate(data)
    }
    server.welcome({i: client.hello() for i, client in clients.items()})
    return server, clients


def line_round(server, clients, t=1):
    """A round of all clients; gives their uploads."""
    train_round(server, clients, list(clients), t)
    return {i: client.upload() for i, client in clients.items()}


def slope(client) -> float:
    """a."""
    return client.model.extractor.weight.item()

"""Makes a run's server and clients from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedapa_mpi import models, schedule, strategies, streams
from fedapa_mpi.config import Experiment
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.strategies.base import Client, Server, Setup


@dataclass(frozen=True)
class Shape:
    """What a party has to know of the data and the run beside its configuration."""

    classes: int
    input_shape: tuple[int, ...]
    horizon: int  # T of the run's first start

    def note(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_note(cls, note: dict[str, Any]) -> Shape:
        """Back from a message, where tuples have become lists."""
        return cls(note["classes"], tuple(note["input_shape"]), note["horizon"])


def make_server(experiment: Experiment, shape: Shape) -> Server:
    """The server of the experiment's strategy, in its state before round 1.

    Raises:
        ValueError: the model does not fit the data.
    """
    models.check(experiment.run.model, shape.input_shape, shape.classes)
    device = torch.device(experiment.run.server_device)
    setup = _setup(experiment, shape, device)
    with streams.seeded(setup.seed, streams.SERVER, 0, "server", device):
        server = strategies.load(experiment.strategy).Server(setup)
    server.state_dict()  # refuses now what no checkpoint could hold
    return server


def make_client(
    experiment: Experiment,
    shape: Shape,
    client: int,
    shard: Shard,
    device: torch.device,
    poll: Callable[[], None],
) -> Client:
    """One client, its data moved to the device and normalised, in its state before round 1."""
    setup = _setup(experiment, shape, device, client=client, shard=shard.on(device), poll=poll)
    with streams.seeded(setup.seed, client, 0, "client", device):
        party = strategies.load(experiment.strategy).Client(setup)
    party.state_dict()
    return party


def _setup(experiment: Experiment, shape: Shape, device: torch.device, **more: Any) -> Setup:
    run = experiment.run
    Config = strategies.load(experiment.strategy).Config
    return Setup(
        config=Config(**asdict(experiment.method)),
        clients=run.clients,
        classes=shape.classes,
        seed=run.seed,
        lr=run.lr,
        momentum=run.momentum,
        epochs=run.epochs,
        batch_size=run.batch_size,
        drop_last=run.drop_last,
        client_opt=run.client_opt,
        horizon=shape.horizon,
        participation=schedule.participation(run),
        architecture=lambda: models.build(run.model, shape.input_shape, shape.classes),
        device=device,
        **more,
    )

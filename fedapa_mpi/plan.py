"""``--dry_run``: what would run where, with memory and bytes, without training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedapa_mpi import parties
from fedapa_mpi.comm import placement
from fedapa_mpi.comm.messages import Message, copied
from fedapa_mpi.comm.placement import Seat
from fedapa_mpi.config import Experiment
from fedapa_mpi.console import Console
from fedapa_mpi.data.prepare import Federation
from fedapa_mpi.parties import Shape
from fedapa_mpi.store.state import nbytes
from fedapa_mpi.strategies.base import Server


def show(
    console: Console,
    experiment: Experiment,
    shape: Shape,
    federation: Federation,
    server: Server,
    seats: Sequence[Seat],
) -> None:
    """Prints the placement, each client's data, bytes per round and memory above the imports."""
    console.placement(placement.table_rows(seats))
    columns = ("client", "train", "test", *(f"class {c}" for c in range(shape.classes)))
    console.table("samples", columns, _histogram(federation))
    down, up, client = _measured(experiment, shape, federation, server)
    M, shards = experiment.run.clients, _shard_bytes(federation, shape)
    console.say(f"per sampled client and round: {nbytes(down):,} bytes down, {nbytes(up):,} up")
    server_memory = nbytes(server.state_dict()) + M * (nbytes(down) + nbytes(up))
    console.say(
        f"memory above the imports: rank 0 about {_mib(server_memory)} with all clients "
        f"sampled, plus {_mib(sum(shards))} of data until it is handed out"
    )
    for seat in seats[1:] or seats:
        if seat.clients:
            mine = sum(client + shards[i] for i in seat.clients)
            console.say(f"  rank {seat.rank}: about {_mib(mine)} for {seat.role}")


def _measured(
    experiment: Experiment, shape: Shape, federation: Federation, server: Server
) -> tuple[Message, Message, int]:
    """A download, an upload, and the bytes of a client's model, gradient and momentum.

    The download is the one after a first round of client 0: before it some servers have nothing.
    """
    cpu = torch.device("cpu")
    client = parties.make_client(experiment, shape, 0, federation.shards[0], cpu, lambda: None)
    hello = client.hello()  # once: some train before they speak
    server.welcome({i: hello | {"n": torch.tensor(n)} for i, n in enumerate(federation.sizes)})
    ((_, first),) = server.download([0], 1)
    client.receive(copied(first))
    up = client.upload()
    server.aggregate({0: first}, {0: up}, 1)
    ((_, down),) = server.download([0], 2)
    parameters = sum(p.numel() * p.element_size() for p in client.model.parameters())
    # the state is there twice while a round may still be given up
    return down, up, 2 * nbytes(client.state_dict()) + 3 * parameters


def _shard_bytes(federation: Federation, shape: Shape) -> list[int]:
    """Bytes of each client's data as float32 on its device."""
    features = torch.Size(shape.input_shape).numel()
    samples = zip(federation.sizes, federation.test_samples.tolist())
    return [(n + n_test) * (4 * features + 8) for n, n_test in samples]


def _histogram(federation: Federation) -> list[list[str]]:
    table = zip(federation.sizes, federation.test_samples.tolist(), federation.labels.tolist())
    return [
        [str(i), str(n), str(test), *(str(c) if c else "" for c in counts)]
        for i, (n, test, counts) in enumerate(table)
    ]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"

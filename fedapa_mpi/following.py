"""A client rank from rank 0's word to the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedapa_mpi import parties, rounds
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import Envelope, Kind
from fedapa_mpi.comm.orders import Action
from fedapa_mpi.comm.transport import SERVER, Transport
from fedapa_mpi.comm.world import World, visible_devices
from fedapa_mpi.config import Experiment
from fedapa_mpi.crew import Crew
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.data.prepare import read_shard
from fedapa_mpi.failing import PATIENCE, Guard, Place
from fedapa_mpi.log import log
from fedapa_mpi.parties import Shape
from fedapa_mpi.stopping import Abandoned, StopFlag
from fedapa_mpi.strategies.base import Client


def follow(world: World, flag: StopFlag, guard: Guard) -> None:
    """Enlists, receives clients and their data, and works until told to stop."""
    clock = Clock()
    guard.place.client, guard.place.round = None, 0  # what an earlier run left
    transport = Transport(world.comm, clock)
    guard.tell = lambda text: transport.last_words(text, PATIENCE)
    transport.watch = _watch(transport, flag)
    note = {"node": world.node, "host": world.host, "devices": list(visible_devices())}
    transport.post(Envelope(Kind.ENLIST, note=note), SERVER)
    begin = transport.take(Kind.BEGIN, SERVER).note
    if not begin.get("refused"):
        try:
            _run(begin, transport, clock, guard.place)
        except Abandoned:
            pass  # rank 0 has given the run up
        except Exception as error:
            if not begin["sweep"]:
                raise
            _sit_out(error, transport, guard)
    transport.close()


def _run(begin: dict[str, Any], transport: Transport, clock: Clock, place: Place) -> None:
    """One run, from the configuration to rank 0's word to stop."""
    experiment, device = Experiment.from_flat(begin["config"]), torch.device(begin["device"])
    torch.set_num_threads(experiment.run.threads)
    transport.pinned = device.type == "cuda"
    run = experiment.run
    with _unless_given_up(transport):
        clients = _clients(experiment, device, begin, transport)
        crew = Crew(clients, run.clients, run.seed, device, clock, place)
        _join(crew, begin["resumed_from"], transport)
    rounds.work(crew, transport, clock)


def _sit_out(error: Exception, transport: Transport, guard: Guard) -> None:
    """Tells rank 0 that this rank failed, and waits for the end of the run, maybe for the next."""
    log.error("error on %s", guard.place, exc_info=error)
    transport.post(Envelope(Kind.FAILED, note={"text": guard.line(error)}), SERVER)
    while transport.await_order().action is not Action.STOP:
        pass


def _clients(
    experiment: Experiment, device: torch.device, begin: dict[str, Any], transport: Transport
) -> dict[int, Client]:
    """This rank's clients, in their state before round 1."""
    shape = Shape.from_note(begin["shape"])
    clients = {}
    for i in begin["clients"]:
        if begin["file"] is None:
            shard = Shard.from_message(transport.receive(Kind.SHARD, i, 0))
        else:
            shard = read_shard(begin["file"], i)
        clients[i] = parties.make_client(experiment, shape, i, shard, device, transport.poll)
    return clients


def _join(crew: Crew, resumed_from: int | None, transport: Transport) -> None:
    """Says hello to the server, or takes the state that a checkpoint of some round holds."""
    for i, client in crew.members.items():
        if resumed_from is None:
            transport.send(Kind.HELLO, i, 0, crew.hello(i))
        else:
            client.load_state_dict(transport.receive(Kind.STATE, i, resumed_from))


@contextmanager
def _unless_given_up(transport: Transport) -> Iterator[None]:
    """Raises Abandoned in here if rank 0 ends the run: what is waited for may never come."""
    plain = transport.watch

    def watch() -> None:
        plain()
        if transport.waiting(Kind.FAREWELL):
            raise Abandoned

    transport.watch = watch
    try:
        yield
    finally:
        transport.watch = plain


def _watch(transport: Transport, flag: StopFlag) -> Any:
    """Passes a signal on to rank 0, and notices when rank 0 gives the round up."""
    told = False

    def watch() -> None:
        nonlocal told
        if flag.asked() and not told:
            told = True
            transport.post(Envelope(Kind.SIGNAL, note={"reason": flag.reason}), SERVER)
        if transport.in_round and transport.waiting(Kind.ORDER):
            raise Abandoned  # during a round the only order that can come

    return watch

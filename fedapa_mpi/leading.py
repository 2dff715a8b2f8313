"""Rank 0 from a settled request to the end of the run: data, placement, folder, parties, rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from fedapa_mpi import parties, plan, rounds
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm import placement
from fedapa_mpi.comm.messages import Envelope, Kind, copied
from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.comm.placement import Enlisted, Seat
from fedapa_mpi.comm.traffic import Traffic
from fedapa_mpi.comm.transport import Transport
from fedapa_mpi.comm.world import World, visible_devices
from fedapa_mpi.conductor import Conductor
from fedapa_mpi.console import BriefConsole, Console
from fedapa_mpi.crew import Crew
from fedapa_mpi.data.prepare import Federation, prepare
from fedapa_mpi.failing import Guard, refuse
from fedapa_mpi.log import log
from fedapa_mpi.parties import Shape
from fedapa_mpi.start import Start
from fedapa_mpi.stopping import Abandoned, RankFailedError, StopFlag
from fedapa_mpi.store.checkpoint import Checkpoint
from fedapa_mpi.strategies.base import Server


class RunFailedError(Exception):
    """A run of a sweep failed; the message says where and why."""


def lead(
    settled: Start,
    world: World,
    flag: StopFlag,
    guard: Guard,
    *,
    dry_run: bool = False,
    sweep: bool = False,
) -> int:
    """Runs the server, and the clients too if this is the only rank; returns the exit status.

    Args:
        dry_run: only say what would run where.
        sweep: print little, and end only this run when it fails.

    Raises:
        RunFailedError: in a sweep; the other ranks are ready for the next run.
    """
    run = settled.experiment.run
    guard.place.client, guard.place.round = None, 0  # what an earlier run left
    torch.set_num_threads(run.threads)
    clock, traffic = Clock(), Traffic(run.clients)
    transport = Transport(world.comm, clock, traffic) if world.size > 1 else None
    with Checkpoint(settled.checkpoint) if settled.checkpoint else nullcontext() as stored:
        try:
            federation = prepare(run)
            shape = _shape(settled, federation, stored)
            server = parties.make_server(settled.experiment, shape)
            seats = _seats(settled, federation, world, transport)
            console = (BriefConsole if sweep else Console)(alone=world.size == 1)
            if dry_run:
                plan.show(console, settled.experiment, shape, federation, server, seats)
                _dismiss(transport)
                return 0
            settled.folder.create()
            settled.folder.lock()
            conductor = Conductor.of(
                settled,
                federation,
                shape,
                server,
                stored,
                world.library,
                flag=flag,
                clock=clock,
                traffic=traffic,
                console=console,
                place=guard.place,
                ranks=world.size,
            )
        except Exception as error:
            known = isinstance(error, ValueError | OSError)
            if not (known or sweep):
                raise
            settled.folder.unlock()
            if sweep:
                _dismiss(transport)
                raise RunFailedError(str(error) if known else _told(error, guard)) from error
            status = refuse(error)
            _dismiss(transport)
            return status
        guard.tell = conductor.fail
        _introduce(console, server, seats, federation)
        try:
            if transport is None:
                _alone(settled, shape, federation, seats[0], server, conductor, stored, guard)
            else:
                _with_others(
                    settled, shape, federation, seats, server, conductor, stored, transport, sweep
                )
                transport = None  # the other ranks are ready for the next run
            conductor.close()
        except Exception as error:
            if not sweep or isinstance(error, TimeoutError):
                raise  # a rank that does not answer would not answer in the next run either
            raise _failed(error, conductor, transport, guard) from error
        finally:
            settled.folder.unlock()
    return 0


def _failed(
    error: Exception, conductor: Conductor, transport: Transport | None, guard: Guard
) -> RunFailedError:
    """Ends one run of a sweep on all ranks."""
    reason = _told(error, guard)
    if transport is not None:
        transport.forgiving, transport.watch = True, lambda: None
        transport.announce(Order(Action.ABANDON, conductor.done))
        transport.announce(Order(Action.STOP, conductor.done))
        transport.close()
    with suppress(OSError):  # the disk may be full
        conductor.fail(reason)
    return RunFailedError(reason)


def _told(error: Exception, guard: Guard) -> str:
    """The reason on one line, after the traceback, unless another rank has said it."""
    if not isinstance(error, RankFailedError):
        log.error("error on %s", guard.place, exc_info=error)
    return guard.line(error)


def _shape(settled: Start, federation: Federation, stored: Checkpoint | None) -> Shape:
    """Raises ValueError if the data are not the ones that the stored run was trained on."""
    horizon = settled.experiment.run.rounds
    if stored is not None:
        horizon = int(stored.attributes["horizon"])
        for name in ("partition_hash", "data_hash"):
            if stored.attributes[name] != getattr(federation, name):
                raise ValueError(
                    f"{name} of the stored run is {stored.attributes[name]}, of the data found "
                    f"now {getattr(federation, name)}: give --data_dir the files it started with, "
                    "or --dataset the same federation file"
                )
    return Shape(federation.classes, federation.input_shape, horizon)


def _seats(
    settled: Start, federation: Federation, world: World, transport: Transport | None
) -> list[Seat]:
    """Who sits where. Raises ValueError for a device that a rank does not have."""
    run = settled.experiment.run
    enlisted = [Enlisted(0, world.node, world.host, visible_devices())]
    if transport is not None:
        for rank, e in transport.collect_ranks(Kind.ENLIST, range(1, world.size)).items():
            note = e.note
            enlisted.append(Enlisted(rank, note["node"], note["host"], tuple(note["devices"])))
    clients = placement.assign(federation.sizes, max(1, world.size - 1))
    return placement.seats(enlisted, clients, run.server_device, run.device)


def _introduce(
    console: Console, server: Server, seats: Sequence[Seat], federation: Federation
) -> None:
    """What the user should see before the first round."""
    console.placement(placement.table_rows(seats))
    notices = [placement.sharing_notice(seats), *server.notices()]
    if any(not seat.clients for seat in seats[1:]):
        notices.append("there are more client ranks than clients: some have nothing to do")
    setup = server.setup
    if setup.drop_last == "true":
        idle = [i for i, n in enumerate(federation.sizes) if n < setup.batch_size]
    else:
        idle = [i for i, n in enumerate(federation.sizes) if n == 0]
    if idle:
        notices.append(
            f"clients {placement.spans(idle)} have too few samples for a step: they never train"
        )
    for notice in filter(None, notices):
        log.warning("%s", notice)


def _alone(
    settled: Start,
    shape: Shape,
    federation: Federation,
    seat: Seat,
    server: Server,
    conductor: Conductor,
    stored: Checkpoint | None,
    guard: Guard,
) -> None:
    """One process: the clients live here."""

    def poll() -> None:
        if conductor.out_of_time():
            raise Abandoned

    device, experiment = torch.device(seat.device), settled.experiment
    clients = {
        i: parties.make_client(experiment, shape, i, shard, device, poll)
        for i, shard in enumerate(federation.shards)
    }
    run = experiment.run
    crew = Crew(clients, run.clients, run.seed, device, conductor.clock, guard.place)
    if stored is None:
        server.welcome({i: copied(crew.hello(i)) for i in crew.members})
    else:
        for i, client in crew.members.items():
            client.load_state_dict(stored.client(i))
    rounds.simulate(server, crew, conductor)


def _with_others(
    settled: Start,
    shape: Shape,
    federation: Federation,
    seats: Sequence[Seat],
    server: Server,
    conductor: Conductor,
    stored: Checkpoint | None,
    transport: Transport,
    sweep: bool,
) -> None:
    """Several processes: hands the clients their data and state, then leads the rounds."""

    def watch() -> None:
        transport.take_waiting(Kind.FAILED)  # raises if there is one
        signal = transport.take_waiting(Kind.SIGNAL)
        if signal is not None:
            conductor.flag.ask(signal.note["reason"])
        if transport.in_round and conductor.out_of_time():
            raise Abandoned

    run = settled.experiment.run
    transport.watch, transport.silence = watch, run.watchdog
    transport.pinned = run.server_device != "cpu"
    transport.rank_of = {i: seat.rank for seat in seats for i in seat.clients}
    for seat in seats[1:]:
        note = {
            "config": settled.experiment.flat(),
            "shape": shape.note(),
            "clients": list(seat.clients),
            "device": seat.device,
            "resumed_from": None if stored is None else stored.round,
            "sweep": sweep,
            "file": federation.file,
        }
        transport.post(Envelope(Kind.BEGIN, note=note), seat.rank)
    for i, shard in enumerate(federation.shards if federation.file is None else ()):
        transport.send(Kind.SHARD, i, 0, shard.message())
    if stored is None:
        server.welcome(transport.collect(Kind.HELLO, range(run.clients), 0))
    else:
        for i in range(run.clients):
            transport.send(Kind.STATE, i, stored.round, stored.client(i))
            transport.flush()  # one at a time, so that memory stays small
    rounds.serve(server, transport, conductor)
    transport.close()


def _dismiss(transport: Transport | None) -> None:
    """Sends everybody home before anything has begun."""
    if transport is not None:
        for rank in range(1, transport.size):
            transport.post(Envelope(Kind.BEGIN, note={"refused": True}), rank)
        transport.close()

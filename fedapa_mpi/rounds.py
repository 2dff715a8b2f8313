"""The main loop, in three views of the same round:

    download -> receive -> (evaluate) -> train -> (evaluate) -> upload -> aggregate

``simulate`` is the specification, one process. ``serve`` (rank 0) and ``work`` (the other ranks)
are the same verbs cut in two where messages cross.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedapa_mpi import streams
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import Envelope, Kind, Message, copied
from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.comm.transport import SERVER, Transport
from fedapa_mpi.conductor import Conductor
from fedapa_mpi.crew import Crew
from fedapa_mpi.records import RankReport
from fedapa_mpi.stopping import Abandoned
from fedapa_mpi.store.state import State, copy_of
from fedapa_mpi.strategies.base import Server


def simulate(server: Server, crew: Crew, conductor: Conductor) -> None:
    """All rounds in one process: what every other layout has to reproduce bit for bit."""
    t = 0

    def carry(kind: Kind, i: int, message: Message) -> Message:
        conductor.traffic.count(Envelope(kind, i, t, message))
        return copied(message)

    def states() -> Iterator[tuple[int, State]]:
        return ((i, client.state_dict()) for i, client in crew.members.items())

    for order in conductor.orders():
        t = order.round
        crew.begin(t)
        before = _before(server, order)
        try:
            for i, message in _deliveries(server, order, conductor.clock):
                _try_out(crew, i, carry(Kind.DELIVERY, i, message), order)
            for i in order.held:
                crew.evaluate_held(i, t)
            for turn in order.turns():
                sent = dict(_downloads(server, turn, t, conductor.clock))
                arrived = {i: carry(Kind.DOWNLOAD, i, sent[i]) for i in turn}
                uploads = {}
                for i in order.answering(turn):
                    upload = crew.participate(i, arrived.pop(i), order)
                    uploads[i] = carry(Kind.UPLOAD, i, upload)
                _aggregate(server, sent, conductor.accept(uploads, t), t, conductor.clock)
        except Abandoned:
            crew.undo()
            _put_back(server, before)
            break
        report = RankReport(crew.report(), crew.identity(), conductor.clock.take())
        conductor.record(order, {SERVER: report})
        if conductor.checkpoint_due():
            conductor.save(states())
    if conductor.save_needed:
        conductor.save(states())


def serve(server: Server, transport: Transport, conductor: Conductor) -> None:
    """Rank 0: decides, sends, collects, aggregates."""
    ranks = range(1, transport.size)

    def states() -> Iterator[tuple[int, State]]:
        for i in range(conductor.run.clients):
            yield i, transport.receive(Kind.STATE, i, conductor.done)

    def save() -> None:
        transport.announce(Order(Action.CHECKPOINT, conductor.done))
        conductor.save(states())

    for order in conductor.orders():
        t = order.round
        transport.announce(order)
        before = _before(server, order)
        for i, message in _deliveries(server, order, conductor.clock):
            transport.send(Kind.DELIVERY, i, t, message)
        try:
            for turn in order.turns():
                sent = {}
                for i, message in _downloads(server, turn, t, conductor.clock):
                    transport.send(Kind.DOWNLOAD, i, t, message)
                    sent[i] = message
                with transport.interruptible():
                    uploads = transport.collect(Kind.UPLOAD, order.answering(turn), t)
                _aggregate(server, sent, conductor.accept(uploads, t), t, conductor.clock)
        except Abandoned:
            transport.announce(Order(Action.ABANDON, t))
            _put_back(server, before)
            break
        reports = transport.collect_ranks(Kind.REPORT, ranks)
        own = RankReport({}, {}, conductor.clock.take())
        conductor.record(order, {SERVER: own} | {r: _unpacked(e) for r, e in reports.items()})
        if conductor.checkpoint_due():
            save()
    if conductor.save_needed:
        save()
    transport.announce(Order(Action.STOP, conductor.done))


def work(crew: Crew, transport: Transport, clock: Clock) -> None:
    """The other ranks: obey orders until one says stop."""
    while (order := transport.await_order()).action is not Action.STOP:
        if order.action is Action.CHECKPOINT:
            with clock.span("checkpoint"):
                for i, client in crew.members.items():
                    transport.send(Kind.STATE, i, order.round, client.state_dict())
                    transport.flush()  # one state at a time, so that memory stays small
        elif order.action is Action.ABANDON:
            crew.undo()
        else:
            try:
                with transport.interruptible():
                    _take_part(crew, transport, order, clock)
            except Abandoned:
                continue  # the order that says so is next


def _take_part(crew: Crew, transport: Transport, order: Order, clock: Clock) -> None:
    t = order.round
    crew.begin(t)
    for turn in order.turns():
        for i in crew.mine(turn):
            message = transport.receive(Kind.DOWNLOAD, i, t)
            if i not in order.dropped:
                transport.send(Kind.UPLOAD, i, t, crew.participate(i, message, order))
    for i in crew.mine((*order.delivered, *order.newcomers)):
        _try_out(crew, i, transport.receive(Kind.DELIVERY, i, t), order)
    for i in crew.mine(order.held):
        crew.evaluate_held(i, t)
    note = {"identity": crew.identity(), "seconds": clock.take()}
    transport.post(Envelope(Kind.REPORT, round=t, tensors=crew.report(), note=note), SERVER)


def _try_out(crew: Crew, i: int, message: Message, order: Order) -> None:
    """A client gets a delivery that leaves no trace in its state."""
    tried = crew.try_newcomer if i in order.newcomers else crew.evaluate_delivered
    tried(i, message, order.round)


def _deliveries(server: Server, order: Order, clock: Clock) -> Iterator[tuple[int, Message]]:
    """What is sent for evaluation only; not traffic."""
    yield from _downloads(server, order.delivered, order.round, clock)
    for i in order.newcomers:
        message = server.newcomer()
        assert message is not None, "an order names newcomers only if there is something for them"
        yield i, message


def _downloads(
    server: Server, ids: tuple[int, ...], t: int, clock: Clock
) -> Iterator[tuple[int, Message]]:
    """The server's messages for a turn, each handed on as soon as it exists."""
    if not ids:
        return
    with streams.seeded(server.setup.seed, streams.SERVER, t, "download", server.setup.device):
        messages = server.download(ids, t)
        while True:
            with clock.span("server"):
                message = next(messages, None)
            if message is None:
                return
            yield message


def _aggregate(
    server: Server, sent: dict[int, Message], uploads: dict[int, Message], t: int, clock: Clock
) -> None:
    setup = server.setup
    with (
        clock.span("server"),
        streams.seeded(setup.seed, streams.SERVER, t, "aggregate", setup.device),
    ):
        here = {i: _moved(message, setup.device) for i, message in uploads.items()}
        server.aggregate(sent, here, t)


def _moved(message: Message, device: torch.device) -> Message:
    return {name: tensor.to(device) for name, tensor in message.items()}


def _before(server: Server, order: Order) -> State | None:
    """What the server must be put back to if the round is given up.

    None in parallel order: there the server learns at the very end, when nothing can be given up.
    """
    return copy_of(server.state_dict()) if order.sequential else None


def _put_back(server: Server, before: State | None) -> None:
    if before is not None:
        server.load_state_dict(before)


def _unpacked(envelope: Envelope) -> RankReport:
    return RankReport(envelope.tensors, envelope.note["identity"], envelope.note["seconds"])

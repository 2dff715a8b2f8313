"""Messages between rank 0 and the client ranks: the only user of MPI in a round.

Every message leaves by ``Isend`` and is received by a matched probe and ``Irecv`` into a buffer of
its size. Nothing here blocks inside MPI: a blocking call spins, which slows the ranks that train
on the same cores many times, and no Python signal handler runs meanwhile. So a wait is a test and
a sleep that grows with the time waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import BLOCK, Envelope, Kind, Message, pack, unpack
from fedapa_mpi.comm.orders import Order
from fedapa_mpi.comm.traffic import Traffic
from fedapa_mpi.comm.waiting import Wait
from fedapa_mpi.stopping import RankFailedError

if TYPE_CHECKING:
    from mpi4py import MPI

SERVER = 0


class Transport:
    """One rank's end of all messages of a run.

    Args:
        comm: a communicator of this run's own.
        clock: charged with ``wait`` and ``transfer``.
        traffic: counts the method's bytes; the server has one.

    Public attributes are set once they are known:
        rank_of: client -> its rank, at the server.
        watch: called in every wait and poll; raises to interrupt what goes on.
        pinned: pack into page-locked memory, because tensors come from a GPU.
    """

    def __init__(self, comm: MPI.Intracomm, clock: Clock, traffic: Traffic | None = None) -> None:
        from mpi4py import MPI  # starts MPI, which one process alone does without

        self.rank: int = comm.rank
        self.size: int = comm.size
        self.rank_of: dict[int, int] = {}
        self.watch: Callable[[], None] = lambda: None
        self.pinned = False
        self._mpi, self._comm, self._traffic, self._clock = MPI, comm, traffic, clock
        self.in_round = False  # whether what goes on now may be given up
        self.forgiving = False  # whether another rank's failure no longer matters
        self.silence: float | None = None  # seconds without a message after which a wait fails
        # counted in blocks, a message above 2 GiB stays below the 2^31 - 1 elements that
        # Open MPI accepts
        self._block = MPI.BYTE.Create_contiguous(BLOCK).Commit()
        self._leaving: list[tuple[MPI.Request, Tensor]] = []
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    # -- one message -----------------------------------------------------------------------------

    def send(self, kind: Kind, client: int, t: int, message: Message) -> None:
        """Starts a message about a client: to its rank from the server, else to the server."""
        rank = self.rank_of[client] if self.rank == SERVER else SERVER
        self.post(Envelope(kind, client, t, message), rank)

    def post(self, envelope: Envelope, rank: int) -> None:
        """Starts any message to any rank; its memory is free for others at once."""
        with self._clock.span("transfer"):
            buffer = pack(envelope, pinned=self.pinned)
            block = [buffer.numpy(), len(buffer) // BLOCK, self._block]
            request = self._comm.Isend(block, dest=rank, tag=envelope.kind)
            self._leaving.append((request, buffer))
            self._sent[rank] += 1
            self._count(envelope)
            self._progress()

    def receive(self, kind: Kind, client: int, t: int) -> Message:
        """Waits for the message of this kind about one client in round t."""
        rank = self.rank_of[client] if self.rank == SERVER else SERVER
        envelope = self.take(kind, rank)
        if (envelope.client, envelope.round) != (client, t):
            raise RuntimeError(
                f"rank {self.rank} got {kind.name} of client {envelope.client}, round "
                f"{envelope.round}, and waited for client {client}, round {t}"
            )
        return envelope.tensors

    def take(self, kind: Kind, rank: int) -> Envelope:
        """Waits for the next message of this kind from one rank."""
        (envelope,) = self._gather(kind, [rank]).values()
        return envelope

    # -- many messages ---------------------------------------------------------------------------

    def collect(self, kind: Kind, ids: Sequence[int], t: int) -> dict[int, Message]:
        """The server waits for one message of each client, in whatever order; ascending result."""
        due: Counter[int] = Counter(self.rank_of[i] for i in ids)
        found = self._gather(kind, due.elements(), by_client=True)
        wrong = [e for e in found.values() if e.round != t or e.client not in ids]
        if wrong or len(found) != len(ids):
            raise RuntimeError(
                f"{kind.name} of round {t} came from clients {sorted(found)}, "
                f"expected {sorted(ids)}"
            )
        return {i: found[i].tensors for i in sorted(found)}

    def collect_ranks(self, kind: Kind, ranks: Iterable[int]) -> dict[int, Envelope]:
        """The server waits for one message of each rank; ascending result."""
        found = self._gather(kind, ranks)
        return {rank: found[rank] for rank in sorted(found)}

    def announce(self, order: Order) -> None:
        """The server tells every other rank what to do next."""
        for rank in range(1, self.size):
            self.post(Envelope(Kind.ORDER, round=order.round, note=order.note()), rank)

    def await_order(self) -> Order:
        """A client rank waits for what it is to do next."""
        return Order.from_note(self.take(Kind.ORDER, SERVER).note)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Marks what may be given up: ``watch`` may raise Abandoned in here."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round = False

    # -- waiting ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """To be called between batches: lets sends progress and looks whether to go on."""
        self._progress()
        self.watch()

    def waiting(self, kind: Kind) -> bool:
        """Whether a message of this kind is there to be taken."""
        return self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=kind)

    def take_waiting(self, kind: Kind) -> Envelope | None:
        """A message of this kind if one is there, from whatever rank."""
        came = self._next(kind, range(self.size))
        return came and came[1]

    def last_words(self, text: str, seconds: float) -> None:
        """Tells the server why this rank fails and gives it some time to end the run.

        Touches nothing that another thread may be using.
        """
        buffer = pack(Envelope(Kind.FAILED, note={"text": text[:2000]}))
        block = [buffer.numpy(), len(buffer) // BLOCK, self._block]
        request = self._comm.Isend(block, dest=SERVER, tag=Kind.FAILED)
        wait = Wait()
        while wait.seconds < seconds:
            request.Test()
            wait.pause()

    def flush(self) -> None:
        """Waits until every message has left."""
        wait = Wait()
        while self._leaving:
            self.poll()
            wait.pause()

    def close(self) -> None:
        """Ends the run's messages: receives what is still under way and waits for what leaves.

        A round that was given up leaves messages that nobody waits for, and MPI could not
        finalize. Both sides say how many messages they sent, and take that many and no more: the
        next one would belong to the next run.
        """
        peers = range(1, self.size) if self.rank == SERVER else (SERVER,)
        for rank in peers:
            note = {"sent": self._sent[rank] + 1}
            self.post(Envelope(Kind.FAREWELL, note=note), rank)
        due: dict[int, int | None] = dict.fromkeys(peers)
        wait = Wait()
        while owing := [rank for rank in peers if due[rank] != self._received[rank]]:
            for rank in owing:
                came = self._next(self._mpi.ANY_TAG, [rank])
                if came is not None and came[1].kind is Kind.FAREWELL:
                    due[rank] = came[1].note["sent"]
            self._progress()
            wait.pause()
        while self._leaving:
            self._progress()
            wait.pause()
        self._block.Free()

    def _gather(
        self, kind: Kind, ranks: Iterable[int], by_client: bool = False
    ) -> dict[int, Envelope]:
        """As many messages of this kind as ``ranks`` has entries, each from one of them."""
        due = Counter(ranks)
        found: dict[int, Envelope] = {}
        wait = Wait()
        with self._clock.span("wait"):
            while due:
                came = self._next(kind, due)
                if came is None:
                    self._progress()
                    self._watch_wait(wait, kind, due)
                    wait.pause()
                    continue
                rank, envelope = came
                found[envelope.client if by_client else rank] = envelope
                due[rank] -= 1
                due += Counter()  # drops ranks that owe nothing more
                wait.restart()
        return found

    def _watch_wait(self, wait: Wait, kind: Kind, due: Mapping[int, int]) -> None:
        self.watch()
        if self.silence is not None and wait.seconds > self.silence:
            raise TimeoutError(
                f"rank {self.rank} has waited {wait.seconds:.0f} s for {kind.name} from rank "
                f"{', '.join(map(str, sorted(due)))}: see what those ranks do, or raise --watchdog"
            )

    def _next(self, tag: int, ranks: Iterable[int]) -> tuple[int, Envelope] | None:
        """The next message with this tag from any of these ranks, if one is there."""
        ranks = set(ranks)
        source = ranks.pop() if len(ranks) == 1 else self._mpi.ANY_SOURCE
        status = self._mpi.Status()
        matched = self._comm.Improbe(source=source, tag=tag, status=status)
        if matched is None:
            return None
        with self._clock.span("transfer"):
            blocks = status.Get_count(self._block)
            buffer = torch.empty(blocks * BLOCK, dtype=torch.uint8)
            request = matched.Irecv([buffer.numpy(), blocks, self._block])
            wait = Wait()
            while not request.Test():
                self._progress()
                wait.pause()
            envelope = unpack(buffer)
        self._received[status.source] += 1
        self._count(envelope)
        if envelope.kind is Kind.FAILED and not self.forgiving:
            raise RankFailedError(envelope.note["text"])
        return status.source, envelope

    def _count(self, envelope: Envelope) -> None:
        if self._traffic is not None:
            self._traffic.count(envelope)

    def _progress(self) -> None:
        self._leaving = [(request, b) for request, b in self._leaving if not request.Test()]

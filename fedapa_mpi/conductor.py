"""What rank 0 decides about a run and writes down: rounds, records, checkpoints, the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedapa_mpi import records, schedule, start, strategies
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import Message
from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.comm.traffic import Traffic
from fedapa_mpi.config import Experiment
from fedapa_mpi.console import Console
from fedapa_mpi.data.prepare import Federation
from fedapa_mpi.failing import Place
from fedapa_mpi.log import log
from fedapa_mpi.parties import Shape
from fedapa_mpi.records import RankReport
from fedapa_mpi.recovery import Truth
from fedapa_mpi.scores import Scoreboard
from fedapa_mpi.start import Start
from fedapa_mpi.stopping import StopFlag, parse_duration
from fedapa_mpi.store import checkpoint
from fedapa_mpi.store.checkpoint import Checkpoint
from fedapa_mpi.store.fingerprint import Fingerprint, comparable
from fedapa_mpi.store.folder import RunFolder
from fedapa_mpi.store.results import Results
from fedapa_mpi.store.state import State
from fedapa_mpi.strategies.base import Server

CHECKPOINT_SHARE = 0.05  # of the wall time, at most, with --checkpoint_every auto


@dataclass
class Conductor:
    """Leads a run round by round. It holds no client, and no server state of its own."""

    experiment: Experiment
    server: Server
    folder: RunFolder
    results: Results
    scoreboard: Scoreboard
    flag: StopFlag
    clock: Clock
    traffic: Traffic
    console: Console
    place: Place  # kept up to date, for error messages
    attributes: Mapping[str, str | int | float]  # what every checkpoint says of the run
    truth: Truth | None  # who belongs together, if that is known
    ranks: int
    also: tuple[str, ...] = ()  # the strategy's further ways of answering
    done: int = 0  # rounds finished
    fingerprint: str = ""
    final: dict[str, np.ndarray] = field(default_factory=dict)  # measured after the last round
    _in_round: bool = False  # there is nothing to give up before the first one
    _saved: int = -1  # round of the newest checkpoint
    _started: float = field(default_factory=time.monotonic)
    _saving: float = 0.0  # seconds spent on checkpoints
    _round_started: float = 0.0

    @classmethod
    def of(
        cls,
        settled: Start,
        federation: Federation,
        shape: Shape,
        server: Server,
        stored: Checkpoint | None,
        library: str,
        **more: Any,
    ) -> Conductor:
        """A conductor for a new run, or one that goes on from a stored checkpoint.

        Creates or cuts back the results and puts the server into the stored state.
        """
        settled.folder.write_status("running", rounds=settled.experiment.run.rounds)
        attributes: dict[str, str | int | float] = {
            "strategy": settled.experiment.strategy,
            "versions": start.versions(),
            "horizon": shape.horizon,
            "partition_hash": federation.partition_hash,
            "data_hash": federation.data_hash,
        }
        M = settled.experiment.run.clients
        also = strategies.load(settled.experiment.strategy).Client.ALSO
        scoreboard = Scoreboard(M, 1 + len(also))
        if stored is None:
            results = Results.create(
                settled.folder.results,
                attributes={**attributes, "config": settled.experiment.flat(), "mpi": library},
                labels=federation.labels[:M],
                test_samples=federation.test_samples[:M],
                groups=None if federation.groups is None else federation.groups[:M],
            )
        else:
            _warn_of_versions(stored)
            results = Results.open(settled.folder.results)
            results.cut(stored.round)
            config = settled.experiment.flat()
            results.set(config=config, mpi=library, status="running", fingerprint="")
            checkpoint.cut(settled.folder.checkpoints, stored.round)
            server.load_state_dict(stored.server())
            scoreboard.load_state_dict(stored.extra("scores"))
        return cls(
            settled.experiment,
            server,
            settled.folder,
            results,
            scoreboard,
            attributes=attributes,
            truth=None if federation.truth is None else federation.truth.of_first(M),
            also=also,
            done=0 if stored is None else stored.round,
            _saved=-1 if stored is None else stored.round,
            **more,
        )

    def __post_init__(self) -> None:
        self.run = self.experiment.run
        self._max_time = parse_duration(self.run.max_time) if self.run.max_time else float("inf")
        self._skipped: set[int] = set()

    def fail(self, reason: str) -> None:
        """Writes down that the run failed."""
        self.folder.write_status("failed", round=self.done, rounds=self.run.rounds, reason=reason)

    # -- before a round --------------------------------------------------------------------------

    def orders(self) -> Iterator[Order]:
        """The orders of all rounds to come, until the last or until somebody asks to stop."""
        for t in range(self.done + 1, self.run.rounds + 1):
            if self.asked_to_stop():
                return
            self.place.round = t
            self._round_started = time.monotonic()
            self._skipped.clear()
            self._in_round = True
            yield self._order(t)
        if not self.asked_to_stop():
            self.place.round = self.run.rounds + 1
            yield self._last_order()

    def asked_to_stop(self) -> bool:
        """Whether a signal or the time limit asks for an orderly stop."""
        if time.monotonic() - self._started >= self._max_time:
            self.flag.ask("max_time")
        return self.flag.asked()

    def out_of_time(self) -> bool:
        """Whether the round under way is to be given up."""
        return self._in_round and self.asked_to_stop() and self.flag.expired(self.run.grace)

    def _order(self, t: int) -> Order:
        run = self.run
        clients = schedule.sampled(run, t)
        dropped = schedule.dropped(run, t) & set(clients)
        points = run.points if schedule.evaluated(run, t) else ()
        silent = set(range(run.clients)) - (set(clients) - dropped)
        others = sorted(silent) if points else []
        broadcast = run.unsampled == "broadcast"
        return Order(
            Action.ROUND,
            t,
            clients,
            dropped,
            points,
            held=() if broadcast else self.scoreboard.unknown(others),
            delivered=tuple(others) if broadcast else (),
            sequential=run.order == "sequential",
        )

    def _last_order(self) -> Order:
        """After the last round: what Algorithm 1 puts out, and the clients outside."""
        M, held_out = self.run.clients, self.run.holdout_clients
        some = self.server.newcomer() is not None
        return Order(
            Action.ROUND,
            self.run.rounds + 1,
            points=("recv",),
            delivered=tuple(range(M)),
            newcomers=tuple(range(M, M + held_out)) if some else (),
        )

    # -- in a round ------------------------------------------------------------------------------

    def accept(self, uploads: Mapping[int, Message], t: int) -> dict[int, Message]:
        """The uploads that may be mixed: those without NaN and infinity.

        Raises:
            FloatingPointError: one is not finite and ``on_nonfinite`` is abort.
        """
        accepted = {}
        for i, upload in uploads.items():
            bad = [name for name, tensor in upload.items() if not _finite(tensor)]
            if not bad:
                accepted[i] = upload
                continue
            what = f"client {i} sent NaN or infinity in {', '.join(bad)} in round {t}"
            if self.run.on_nonfinite == "abort":
                raise FloatingPointError(
                    f"{what}: lower --lr (it is {self.run.lr}), or go on without such uploads "
                    f"with --on_nonfinite skip"
                )
            log.warning("%s: left out", what)
            self._skipped.add(i)
        return accepted

    # -- after a round ---------------------------------------------------------------------------

    def record(self, order: Order, reports: Mapping[int, RankReport]) -> None:
        """Takes down a finished round, or what was measured after the last."""
        rows = records.merged(reports)
        if order.round > self.run.rounds:
            self.final = records.final(order, rows, self.also, self.run.holdout_clients)
            self.results.put(self.final)
            return
        record = records.of_round(
            order,
            reports,
            M=self.run.clients,
            ranks=self.ranks,
            skipped=self._skipped,
            scores=self.scoreboard.enter(order, rows),
            also=self.also,
            traffic=self.traffic.take(),
            A=self._recorded_weights(order.round),
        )
        self.results.append(record)
        self.done = order.round
        self.console.round(record, self.run.rounds, time.monotonic() - self._round_started)

    def _recorded_weights(self, t: int) -> np.ndarray | None:
        weights, every = self.server.weights(), self.run.record_A_every
        if weights is None or not every or t % every:
            return None
        return weights.cpu().numpy()

    def checkpoint_due(self) -> bool:
        """Whether it is time for a checkpoint of the round just finished."""
        if self.run.checkpoint_every == "auto":
            elapsed = time.monotonic() - self._started
            return self._saving <= CHECKPOINT_SHARE * elapsed
        return self.done % int(self.run.checkpoint_every) == 0

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and their outcome is measured."""
        return self.done == self.run.rounds and bool(self.final)

    @property
    def save_needed(self) -> bool:
        """Whether what is done is not in a checkpoint yet, or lacks its fingerprint."""
        return self._saved != self.done or (self.finished and not self.fingerprint)

    def save(self, clients: Iterable[tuple[int, State]]) -> None:
        """Writes results, then the checkpoint; ``clients`` are taken one by one, ascending."""
        start = time.monotonic()
        with self.clock.span("checkpoint"):
            self.results.flush()
            digest = Fingerprint().server(self.server.state_dict())
            checkpoint.save(
                self.folder.checkpoints,
                round=self.done,
                config=self.experiment.flat(),
                attributes=self.attributes,
                server=self.server.state_dict(),
                clients=_digested(digest, clients) if self.finished else clients,
                extras={"scores": self.scoreboard.state_dict()},
            )
            checkpoint.prune(self.folder.checkpoints, self.run.keep)
        if self.finished:
            metrics = comparable(self.results.rows()) | self.final
            self.fingerprint = digest.metrics(metrics).hexdigest()
        self._saved = self.done
        self._saving += time.monotonic() - start
        self._write_status("running")

    def close(self) -> None:
        """Writes down how the run ended, and says it."""
        status = "finished" if self.finished else "interrupted"
        self.results.set(status=status, fingerprint=self.fingerprint)
        self.results.flush()
        self._write_status(status)
        self.console.end(self)

    def _write_status(self, status: str) -> None:
        reason = self.flag.reason if status == "interrupted" else None
        self.folder.write_status(
            status,
            round=self.done,
            rounds=self.run.rounds,
            reason=reason,
            fingerprint=self.fingerprint or None,
        )


def _warn_of_versions(stored: Checkpoint) -> None:
    before, now = str(stored.attributes["versions"]), start.versions()
    if before != now:
        log.warning("the run was started with %s and goes on with %s: bits may differ", before, now)


def _digested(
    digest: Fingerprint, clients: Iterable[tuple[int, State]]
) -> Iterator[tuple[int, State]]:
    for i, state in clients:
        digest.client(i, state)
        yield i, state


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())

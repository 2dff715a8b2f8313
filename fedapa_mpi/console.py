"""What a run prints: where it runs, a line or a bar per round, a table and the fingerprint."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedapa_mpi.recovery import Truth, recovery
from fedapa_mpi.store.results import RoundRecord, Rows, accuracy_metrics

if TYPE_CHECKING:
    from fedapa_mpi.conductor import Conductor

METRICS = {
    "micro": "micro",
    "macro": "macro",
    "std": "std",
    "worst10": "worst 10 %",
    "worst": "worst",
    "sampled/micro": "sampled micro",
    "sampled/macro": "sampled macro",
}


class Console:
    """Rank 0's standard output.

    alone: this is the only process. If it has a terminal, tables use its width and colours and a
    bar shows the progress; some launchers hand their ranks a terminal that nobody sees.
    """

    def __init__(self, alone: bool) -> None:
        plain = not (alone and sys.stdout.isatty())
        self._out = Terminal(
            width=120 if plain else None,
            force_terminal=False if plain else None,
            highlight=False,
            soft_wrap=True,
        )
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if alone and sys.stderr.isatty():
            columns = (
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[score]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Terminal(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=None, score="")

    def say(self, text: str) -> None:
        """One line."""
        self._out.print(text, markup=False)

    def placement(self, rows: Iterable[tuple[str, str, str, str]]) -> None:
        """The table of ranks, hosts, clients and devices."""
        self.table("", ("rank", "host", "clients", "device"), rows)

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """A plain table."""
        table = Table(*columns, title=title or None, box=None, title_justify="left")
        for row in rows:
            table.add_row(*row)
        self._out.print(table, markup=False)

    def round(self, record: RoundRecord, rounds: int, seconds: float) -> None:
        """What one round gave."""
        score = _score_text(record)
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=record.round, total=rounds, score=score)
            return
        loss = record.loss[~np.isnan(record.loss)]
        mean = f"{loss.mean():.4f}" if len(loss) else "-"
        self.say(
            f"round {record.round:>{len(str(rounds))}}/{rounds}  "
            f"clients {int(record.answered.sum())}  loss {mean}  {score}  "
            f"{seconds:.2f} s"
        )

    def end(self, conductor: Conductor) -> None:
        """The table of accuracies, traffic and time, then the fingerprint as the last line."""
        if self._bar is not None:
            self._bar.stop()
        rows = conductor.results.rows()
        if conductor.done:
            self.table(
                "accuracy over all clients with test data",
                ("", *METRICS.values()),
                [*_accuracy_rows(rows), *_final_rows(conductor)],
            )
            self.say(_cost(rows, time.monotonic() - self._started))
            if conductor.truth is not None:
                for line in _learned(rows, conductor.truth):
                    self.say(line)
        self.say(f"results: {conductor.folder.results}")
        if conductor.finished:
            self.say(f"fingerprint: {conductor.fingerprint}")
        else:
            self.say(
                f"interrupted by {conductor.flag.reason} after round {conductor.done} of "
                f"{conductor.run.rounds}; go on with --resume {conductor.folder.path}"
            )


class BriefConsole(Console):
    """One line per run, for a sweep."""

    def __init__(self, alone: bool) -> None:
        super().__init__(alone)
        self._bar = None
        self._score = "no round was left"  # if only the end was still to be measured

    def placement(self, rows: Iterable[tuple[str, str, str, str]]) -> None:
        """Not shown: it is the same for all runs."""

    def round(self, record: RoundRecord, rounds: int, seconds: float) -> None:
        """Kept for the end."""
        self._score = _score_text(record)

    def end(self, conductor: Conductor) -> None:
        """The last round's accuracy and the fingerprint."""
        wall = time.monotonic() - self._started
        how = (
            f"{self._score}  fingerprint {conductor.fingerprint[:12]}"
            if conductor.finished
            else f"interrupted by {conductor.flag.reason} after round {conductor.done}"
        )
        self.say(f"{conductor.folder.path}  {how}  {wall:.1f} s")


def _score_text(record: RoundRecord) -> str:
    parts = []
    for point in ("recv", "post"):
        scores = getattr(record, point)
        if not np.isnan(scores).all():
            macro = accuracy_metrics(scores, record.sampled)["macro"]
            parts.append(f"{point} {macro:.4f}")
    return "  ".join(parts) or "not evaluated"


def _accuracy_rows(rows: Rows) -> list[list[str]]:
    table = []
    for point in ("recv", "post"):
        macro = rows[f"accuracy/{point}/macro"]
        known = np.flatnonzero(~np.isnan(macro))
        if not len(known):
            continue
        best = known[macro[known].argmax()]
        for name, r in (("last", known[-1]), ("best", best)):
            values = [rows[f"accuracy/{point}/{metric}"][r] for metric in METRICS]
            table.append([f"{point} {name} (round {rows['round'][r]})", *map(_number, values)])
    return table


def _final_rows(conductor: Conductor) -> list[list[str]]:
    """What was measured once after the last round: the next download, and clients outside."""
    parts = {f"recv of round {conductor.run.rounds + 1}": "final/recv"}
    if conductor.run.holdout_clients:
        parts |= {f"held-out {point}": f"final/holdout/{point}" for point in ("recv", "post")}
    return [
        [
            title,
            *(_number(float(conductor.final.get(f"{part}/{name}", np.nan))) for name in METRICS),
        ]
        for title, part in parts.items()
        if conductor.final
    ]


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4f}"


def _cost(rows: Mapping[str, Any], wall: float) -> str:
    down, up = (rows[f"bytes/{way}"].sum(axis=1) for way in ("down", "up"))
    compute = np.nansum(rows["seconds/compute"], axis=1)
    return (
        f"bytes per round: {down.mean():,.0f} down, {up.mean():,.0f} up; "
        f"seconds per round: {compute.mean():.2f} of training over all ranks; wall {wall:.1f} s"
    )


def _learned(rows: Rows, truth: Truth) -> list[str]:
    """How well the recorded A tells clients that belong together from the others."""

    if "A" not in rows or not len(rows["A"]):
        return []
    found = recovery(rows["A"][-1], truth.same)
    if found is None:
        return []
    return [
        f"A: mean weight between clients {truth.what} {found.inside:.4f}, with "
        f"others {found.outside:.4f}, AUC {found.auc:.4f}"
    ]

"""``python -m fedapa_mpi.report RUN... [--format terminal|markdown|latex|csv]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedapa_mpi.report import collect, formats
from fedapa_mpi.report.collect import METRICS, POINTS, WHICH, Setting, Summary
from fedapa_mpi.report.formats import Table, number

TITLES = {"micro": "micro", "macro": "macro", "worst10": "worst 10 %"}
AFTER_THE_END = {
    "Test accuracy after the last round, over all clients with test data, all with what the server "
    "would send them next": ("final/recv",),
    "Test accuracy of held-out clients, which took no part, with what the server gives such a "
    "client (recv) and after training it for the epochs of a round (post); -: not available": (
        "final/holdout/recv",
        "final/holdout/post",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status, 2 if there is nothing to report."""
    parser = argparse.ArgumentParser("python -m fedapa_mpi.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or of sweeps")
    parser.add_argument(
        "--format", choices=("terminal", "markdown", "latex", "csv"), default="terminal"
    )
    asked = parser.parse_args(argv)
    try:
        text = report(asked.runs, asked.format)
    except ValueError as error:
        print(f"fedapa-mpi: error: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # as with | head; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def report(paths: Sequence[Path], form: str = "terminal") -> str:
    """The report over all finished runs in or below ``paths``, as text.

    Raises:
        ValueError: there is no finished run, or one is there twice.
    """
    found = [(path, collect.read(path)) for path in collect.find(paths)]
    runs = [run for _, run in found if run is not None]
    for path in (path for path, run in found if run is None):
        print(f"{path.parent}: not finished, left out", file=sys.stderr)
    if not runs:
        raise ValueError("none of the runs has finished")
    runs = collect.aligned(runs)
    for line in collect.unequal(runs):
        print(f"fedapa-mpi: warning: {line}", file=sys.stderr)
    summaries = collect.summarise(runs)
    if form == "csv":
        return _csv(summaries)
    tables = [table for setting in _settings(summaries) for table in _tables(setting, summaries)]
    return {"terminal": formats.terminal, "markdown": formats.markdown, "latex": formats.latex}[
        form
    ](tables)


def _settings(summaries: Sequence[Summary]) -> list[Setting]:
    return list(dict.fromkeys(summary.setting for summary in summaries))


def _tables(setting: Setting, summaries: Sequence[Summary]) -> list[Table]:
    """One table per evaluation point, one of the end of the run, and one of costs."""
    mine = [summary for summary in summaries if summary.setting == setting]
    name = ", ".join(f"{field}={value}" for field, value in setting)
    seeds = sorted({seed for summary in mine for seed in summary.seeds})
    over = f"seed {seeds[0]}"
    if len(seeds) > 1:
        over = f"mean ± sample standard deviation over seeds {', '.join(map(str, seeds))}"
    where = f"{name}; {over}"
    return [
        *(_accuracies(point, where, mine) for point in POINTS),
        *_after_the_end(where, mine),
        _costs(where, mine),
    ]


def _accuracies(point: str, where: str, summaries: Sequence[Summary]) -> Table:
    when = {
        "recv": "after download, before training",
        "post": "after local training",
    }[point]
    columns = {
        f"{which} {TITLES[metric]}": f"{point}/{which}/{metric}"
        for which in WHICH
        for metric in METRICS
    }
    broadcast = ("unsampled", "broadcast") in summaries[0].setting
    others = "what the server would send them" if broadcast else "the model they hold"
    caption = (
        f"Test accuracy {point} ({when}), over all clients with test data, unsampled ones with "
        f"{others}; best: of all rounds, each column on its own; {where}"
    )
    return _table(caption, columns, summaries)


def _after_the_end(where: str, summaries: Sequence[Summary]) -> list[Table]:
    """What was measured once, after the last round; without held-out clients nothing of them."""
    tables = []
    for caption, ends in AFTER_THE_END.items():
        columns = {
            f"{end.rpartition('/')[2]} {TITLES[metric]}": f"{end}/{metric}"
            for end in ends
            for metric in METRICS
        }
        if any(key in summary.mean for summary in summaries for key in columns.values()):
            tables.append(_table(f"{caption}; {where}", columns, summaries))
    return tables


def _table(caption: str, columns: Mapping[str, str], summaries: Sequence[Summary]) -> Table:
    """A row for each method and way of answering; ``columns`` has the keys by their titles."""
    rows = tuple(
        (
            f"{s.method} ({way})" if way else s.method,
            _seeds(s, summaries),
            *(number(*s.pair(f"{way}/{key}" if way else key)) for key in columns.values()),
        )
        for s in summaries
        for way in s.ways
    )
    return Table(caption, ("method", "seeds", *columns), rows)


def _costs(where: str, summaries: Sequence[Summary]) -> Table:
    columns = {
        "bytes down": ("down", 0),
        "bytes up": ("up", 0),
        "training seconds": ("seconds", 2),
        "server seconds": ("server seconds", 3),
    }
    rows = tuple(
        (s.method, _seeds(s, summaries), *(number(*s.pair(key), n) for key, n in columns.values()))
        for s in summaries
    )
    caption = f"Cost of a round, all clients and ranks together; {where}"
    return Table(caption, ("method", "seeds", *columns), rows)


def _seeds(summary: Summary, others: Sequence[Summary]) -> str:
    """How many, and which where that differs from what the caption says."""
    full = {seed for other in others for seed in other.seeds}
    which = "" if set(summary.seeds) == full else f": {' '.join(map(str, summary.seeds))}"
    return f"{len(summary.seeds)}{which}"


def _csv(summaries: Sequence[Summary]) -> str:
    fields = list(dict.fromkeys(field for s in summaries for field, _ in s.setting))
    keys = list(dict.fromkeys(key for s in summaries for key in s.mean))
    header = [
        "method",
        "seeds",
        *fields,
        *(f"{k} {part}" for k in keys for part in ("mean", "std")),
    ]
    rows = []
    for s in summaries:
        setting = dict(s.setting)
        numbers = [value for key in keys for value in s.pair(key)]
        seeds = " ".join(map(str, s.seeds))
        rows.append([s.method, seeds, *(setting.get(f, "") for f in fields), *numbers])
    return formats.comma_separated(header, rows)


if __name__ == "__main__":
    sys.exit(main())

"""Runs many experiments in one launch: strategies x partitions x seeds.

    mpirun -n 3 python -m fedapa_mpi.sweep --strategies all --seeds 0,1,2 [--FLAG VALUE ...]

Starting ranks costs more than a small run, so all runs share one launch. Each has its own folder
under ``--out`` and is a run like any other: repeated, the sweep skips what has finished and goes
on with what has not. For one seed all methods get the same partition, the same schedule of
clients and the same initial model: what a preset says of the partition does not count here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapa_mpi.cli import Request
    from fedapa_mpi.comm.world import World
    from fedapa_mpi.failing import Guard
    from fedapa_mpi.stopping import StopFlag

OWN_FLAGS = ("strategies", "seeds", "partitions", "out")
OTHERWISE = {  # flags of a run that a sweep has another way for
    "seed": "use --seeds",
    "partition": "use --partitions",
    "out": "--out names the folder of the whole sweep",
    "config": "give its values as flags",
    "resume": "repeat the sweep with the same --out to go on",
}
EQUAL = ("min_train", "min_test")  # of the partition, but in a preset of a strategy
HELP = """usage: python -m fedapa_mpi.sweep --strategies LIST [--seeds LIST] [--partitions LIST]
                                  [--out DIR] [--FLAG VALUE ...]

Runs every strategy on every partition with every seed, in one launch (alone or under mpirun).

  --strategies  names, or all; a variant has its flags behind a colon:
                all,fedapa:preset=official,fedapa:gradient=centred,eta=0.1
  --seeds       default 0
  --partitions  default the data set's own
  --out         folder of the sweep, one folder per run in it; default runs/sweep-TIME.
                Repeated with the same folder it skips finished runs and continues the others
  --max_time    of the whole sweep
  other flags   those of python -m fedapa_mpi.run that all strategies share; a variant's own
                value of one goes first. All variants get the same partition, so what a preset
                says of it does not count: give --min_train and --min_test for all

Exit status: 0 if every run has finished or the sweep was told to stop, 1 if a run failed.
Tables of the outcome: python -m fedapa_mpi.report DIR"""


@dataclass(frozen=True)
class Variant:
    """A strategy with flags of its own, by field."""

    strategy: str
    flags: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """As in a folder's name: fedapa_gradient=centred_eta=0.1."""
        name = "_".join([self.strategy, *(f"{name}={value}" for name, value in self.flags)])
        return name.replace("/", "_")


@dataclass(frozen=True)
class Sweep:
    """What is to run: a request per cell, in the order of the runs, and for how many seconds."""

    folder: Path
    cells: tuple[Request, ...]
    max_time: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep that the words after the command ask for; returns this rank's exit status."""
    from fedapa_mpi import entrance

    return entrance.enter(argv, read, lead)


def read(argv: Sequence[str]) -> Sweep:
    """Makes the cells and checks every one of them, before any runs.

    Raises:
        Finished: for ``--help``.
        ValueError: an unknown flag, strategy or value, or one that has no effect in any cell.
    """
    from fedapa_mpi import cli
    from fedapa_mpi.stopping import parse_duration

    if not argv or {"--help", "-h"} & set(argv):
        raise cli.Finished(HELP)
    own, shared = cli.split_flags(argv, OWN_FLAGS)
    if "strategies" not in own:
        raise ValueError("--strategies is missing: names separated by commas, or all")
    folder = Path(own.get("out") or time.strftime("runs/sweep-%Y%m%d-%H%M%S"))
    for name, way in OTHERWISE.items():
        if name in shared:
            raise ValueError(f"--{name} is no flag of a sweep: {way}")
    partitions = [f"--partition={p}" for p in _words(own.get("partitions", ""))]
    seeds = [f"--seed={s}" for s in _words(own.get("seeds", "0"))]
    cells, unused = [], set(shared)
    for seed, partition, variant in product(seeds, partitions or [""], variants(own["strategies"])):
        request, useless = _cell(folder, variant, [*filter(None, (partition, seed))], shared)
        cells.append(request)
        unused &= useless
    if not cells:
        raise ValueError("there is nothing to run: --strategies or --seeds is empty")
    if unused:
        raise ValueError(f"{', '.join(sorted(unused))}: no effect in any run of this sweep")
    limit = shared.get("max_time")
    return Sweep(folder, tuple(cells), None if limit is None else parse_duration(limit))


def variants(text: str) -> list[Variant]:
    """Reads ``all,fedapa:gradient=centred,eta=0.1``: a part with = belongs to the one before it.

    Raises:
        ValueError: an unknown strategy, or flags without one.
    """
    from fedapa_mpi import strategies

    found: list[Variant] = []
    for part in filter(None, text.split(",")):
        name, colon, first = part.partition(":")
        if "=" in name:
            if not found or not found[-1].flags:
                raise ValueError(f"--strategies: {part} stands behind no strategy with a colon")
            found[-1] = Variant(found[-1].strategy, (*found[-1].flags, _flag(part)))
        elif name == "all" and not colon:
            found += map(Variant, strategies.names())
        elif name in strategies.names():
            found.append(Variant(name, (_flag(first),) if colon else ()))
        else:
            known = ", ".join(strategies.names())
            raise ValueError(f"--strategies: {name!r} is none of all, {known}")
    return list(dict.fromkeys(found))


def lead(sweep: Sweep, here: World, flag: StopFlag, guard: Guard) -> int:
    """Rank 0: one run after the other; says at the end which ones failed."""
    from fedapa_mpi import failing, leading, start
    from fedapa_mpi.log import log
    from fedapa_mpi.store.folder import RunFolder

    try:
        RunFolder(sweep.folder).check_writable()
    except ValueError as error:
        return failing.refuse(error)
    if sweep.max_time is not None:
        timer = threading.Timer(sweep.max_time, flag.ask, ["max_time"])
        timer.daemon = True
        timer.start()
    failed: list[str] = []
    waiting = 0
    for cell in sweep.cells:
        if flag.asked():
            log.info("%s: not started, the sweep was told to stop by %s", cell.out, flag.reason)
            waiting += 1
            continue
        try:
            settled = start.settle(cell)
        except (ValueError, OSError) as error:
            failed.append(f"{cell.out}: {error}")
            continue
        if settled.over:
            log.info("%s: finished before", cell.out)
            continue
        here.agree(True)
        try:
            leading.lead(settled, here, flag, guard, sweep=True)
        except leading.RunFailedError as error:  # any other one would leave the ranks behind
            failed.append(f"{cell.out}: {error}")
        guard.tell = lambda text: None  # what happens from now on is no fault of this run
    for line in failed:
        log.error("%s", line)
    print(
        f"sweep: {len(sweep.cells)} runs, {len(failed)} failed, {waiting} not started; tables: "
        f"python -m fedapa_mpi.report {sweep.folder}",
        flush=True,
    )
    return int(bool(failed))


def _cell(
    folder: Path, variant: Variant, own: list[str], shared: dict[str, str]
) -> tuple[Request, set[str]]:
    """The request of one run, and the shared flags that it leaves out as without effect."""
    from fedapa_mpi import cli
    from fedapa_mpi.config import RunConfig
    from fedapa_mpi.data import datasets

    shared = {**{name: str(getattr(RunConfig, name)) for name in EQUAL}, **shared}
    words = [*own, *(f"--{name}={value}" for name, value in variant.flags)]
    useless = cli.useless(variant.strategy, words, shared)
    words[:0] = [f"--{name}={value}" for name, value in shared.items() if name not in useless]
    request = cli.Request(variant.strategy, tuple(words))
    run = cli.resolve(request).run
    dealt = [run.partition] if run.dataset in datasets.partitioned() else []
    out = str(folder / "-".join([variant.name, *dealt, f"seed{run.seed}"]))
    return cli.Request(
        variant.strategy, (*words, f"--out={out}", "--resume=auto"), resume="auto", out=out
    ), useless


def _flag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"--strategies: {text!r} is not flag=value")
    name = name.replace("-", "_")
    if name in OTHERWISE:
        raise ValueError(f"--strategies: {name} is no flag of a variant: {OTHERWISE[name]}")
    return name, value


def _words(text: str) -> list[str]:
    """The parts between commas, each once."""
    return list(dict.fromkeys(filter(None, text.split(","))))


if __name__ == "__main__":
    sys.exit(main())

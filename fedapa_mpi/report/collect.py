"""Reads the results of runs and summarises each over its seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedapa_mpi.config import Experiment, RunConfig, field_names, meaningless

Setting = tuple[tuple[str, Any], ...]

POINTS = ("recv", "post")
METRICS = ("micro", "macro", "worst10")
WHICH = ("last", "best")
SPANS = {"seconds": "compute", "server seconds": "server"}  # of a round, over all ranks
ENDS = ("final/recv", "final/holdout/recv", "final/holdout/post")  # after the last round
# neither part of a setting nor of a method's name
INCIDENTAL = {"seed", *RunConfig.MAY_CHANGE} - {"rounds"}
DEALING = ("min_train", "min_test")  # parts of a preset that belong to the partition
SHOWN = ("dataset", "partition", "model", "clients", "rounds")  # even if they are the defaults


@dataclass(frozen=True)
class Run:
    """One finished run: what it was and what came out.

    preset: those of the setting that the method's preset brought along.
    partition: its hash.
    values: by "post/last/macro" and so on; accuracies, "down" and "up" bytes, "seconds" of
    training and "server seconds" of a round. Keys of a further way of answering begin with its
    name: "head/post/last/macro". After the last round: "final/recv/macro", and of held-out
    clients "final/holdout/post/macro".
    ways: "" for the method's own way of answering, and the names of further ones.
    """

    path: Path
    method: str
    setting: Setting  # the run's flags that are not the defaults
    preset: frozenset[str]
    seed: int
    partition: str
    values: dict[str, float]
    ways: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Summary:
    """One method in one setting. std is the sample standard deviation, NaN for a single seed."""

    method: str
    setting: Setting
    seeds: tuple[int, ...]
    mean: dict[str, float]
    std: dict[str, float]
    ways: tuple[str, ...] = ("",)

    def pair(self, key: str) -> tuple[float, float]:
        """Mean and standard deviation, NaN for what this method has not."""
        return self.mean.get(key, math.nan), self.std.get(key, math.nan)


def find(paths: Iterable[Path]) -> list[Path]:
    """All results.h5 in or below the given folders, sorted, each once.

    Raises:
        ValueError: there are none below one of them.
    """
    found: dict[Path, Path] = {}  # by what they really are
    for path in paths:
        here = [path] if path.name == "results.h5" and path.is_file() else path.rglob("results.h5")
        several = {file.resolve(): file for file in here}
        if not several:
            raise ValueError(f"{path} holds no results.h5: name the folders of runs or of a sweep")
        found = several | found
    return sorted(found.values())


def read(path: Path) -> Run | None:
    """One run's outcome; None if it has not finished.

    Raises:
        ValueError: the file is damaged, or none of ours.
    """
    try:
        return _read(path)
    except (OSError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> Run | None:
    with h5py.File(path, "r", locking=False) as h5:
        if h5.attrs["status"] != "finished":
            return None
        config = Experiment.from_flat(json.loads(h5.attrs["config"]))
        ways = _ways(h5["accuracy/post"])
        values = {key: value for way in ways for key, value in _accuracies(h5, way).items()}
        for way in ("down", "up"):
            values[way] = float(h5[f"bytes/{way}"][:].sum(axis=1).mean())
        for name, span in SPANS.items():
            values[name] = float(np.nansum(h5[f"seconds/{span}"][:], axis=1).mean())
        partition = str(h5.attrs["partition_hash"])
    setting = _setting(config)
    preset = frozenset(name for name in _preset(config) if name in field_names(RunConfig))
    seed = config.run.seed
    return Run(path, method_name(config), setting, preset, seed, partition, values, ways)


def _ways(accuracies: h5py.Group) -> tuple[str, ...]:
    """What groups by the side of the main series stand for; ``sampled`` are other clients."""
    groups = (name for name, item in accuracies.items() if isinstance(item, h5py.Group))
    return ("", *(name for name in groups if name != "sampled"))


def _accuracies(h5: h5py.File, way: str) -> dict[str, float]:
    """All that was measured of one way of answering."""
    head, tail = (f"{way}/", f"/{way}") if way else ("", "")
    values: dict[str, float] = {}
    for point, metric in product(POINTS, METRICS):
        series = h5[f"accuracy/{point}{tail}/{metric}"][:]
        values |= _last_and_best(f"{head}{point}/{{}}/{metric}", series)
    for end, metric in product(ENDS, METRICS):
        measured = h5.get(f"{end}{tail}/{metric}")
        if measured is not None:
            values[f"{head}{end}/{metric}"] = float(measured[()])
    return values


def method_name(config: Experiment) -> str:
    """The strategy, with its own flags that differ from the defaults: fedapa:eta=0.1.

    Flags of the run that the strategy's preset sets are its own, too.
    """
    preset = getattr(config.method, "preset", "paper")
    base = {**_defaults(type(config.method)), **_preset(config)}
    values = config.flat()
    flags = [] if preset == "paper" else [f"preset={preset}"]
    flags += [
        f"{name}={_text(values[name])}"
        for name in base
        if name not in ("preset", *DEALING) and values[name] != base[name]
    ]
    return config.strategy + (":" + ",".join(flags) if flags else "")


def aligned(runs: Sequence[Run]) -> list[Run]:
    """The runs, those with a preset in the setting of others from which only the preset differs."""
    plain = list(dict.fromkeys(run.setting for run in runs if not run.preset))

    def home(run: Run) -> Setting:
        rest = _without(run.setting, run.preset)
        near = [setting for setting in plain if _without(setting, run.preset) == rest]
        return max(near, key=lambda setting: len({*setting} & {*run.setting}), default=rest)

    return [replace(run, setting=home(run)) if run.preset else run for run in runs]


def unequal(runs: Sequence[Run]) -> list[str]:
    """One sentence for each seed of a setting whose runs did not have the same partition."""
    found: dict[tuple[Setting, int], dict[str, str]] = {}
    for run in runs:
        found.setdefault((run.setting, run.seed), {}).setdefault(run.partition, run.method)
    return [
        f"seed {seed}: {' and '.join(methods.values())} did not have the same partition "
        f"({', '.join(f'{name}={value}' for name, value in setting)})"
        for (setting, seed), methods in found.items()
        if len(methods) > 1
    ]


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary per setting and method, in the order in which settings and methods appear."""
    groups: dict[tuple[Any, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.method), []).append(run)
    return [_summary(method, setting, group) for (setting, method), group in groups.items()]


def _summary(method: str, setting: Setting, group: list[Run]) -> Summary:
    seeds = [run.seed for run in group]
    if len(set(seeds)) != len(seeds):
        twice = [str(run.path.parent) for run in group if seeds.count(run.seed) > 1]
        raise ValueError(f"the same run is there twice: {', '.join(twice)}; name one of them")
    table = {name: np.array([run.values[name] for run in group]) for name in group[0].values}
    spread = len(group) > 1
    return Summary(
        method,
        setting,
        tuple(sorted(seeds)),
        {name: float(values.mean()) for name, values in table.items()},
        {n: float(v.std(ddof=1)) if spread else float("nan") for n, v in table.items()},
        group[0].ways,
    )


def _last_and_best(name: str, series: np.ndarray) -> dict[str, float]:
    known = series[~np.isnan(series)]
    last, best = (known[-1], known.max()) if len(known) else (np.nan, np.nan)
    return {name.format("last"): float(last), name.format("best"): float(best)}


def _setting(config: Experiment) -> Setting:
    """What methods are compared under: the run's flags, without those that have no effect."""
    values, defaults = config.flat(), _defaults(RunConfig)
    idle = {text.partition(" ")[0] for text in meaningless(config, field_names(RunConfig))}
    names = [n for n in field_names(RunConfig) if n not in INCIDENTAL and n not in idle]
    return tuple((n, values[n]) for n in names if n in SHOWN or values[n] != defaults[n])


def _without(setting: Setting, names: Collection[str]) -> Setting:
    return tuple((name, value) for name, value in setting if name not in names)


def _preset(config: Experiment) -> dict[str, Any]:
    preset = getattr(config.method, "preset", "paper")
    return getattr(type(config.method), "PRESETS", {}).get(preset, {})


def _defaults(config_class: type[Any]) -> dict[str, Any]:
    return {name: getattr(config_class, name) for name in field_names(config_class)}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

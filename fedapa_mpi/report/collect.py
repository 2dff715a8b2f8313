"""Reads the results of runs and summarises each over its seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedapa_mpi import strategies
from fedapa_mpi.config import RunConfig, field_names

POINTS = ("recv", "post")
METRICS = ("micro", "macro", "worst10")
WHICH = ("last", "best")
# neither part of a setting nor of a method's name
INCIDENTAL = {"seed", "strategy", "preset", *RunConfig.MAY_CHANGE} - {"rounds"}


@dataclass(frozen=True)
class Run:
    """One finished run: what it was and what came out.

    values: by "post/last/macro" and so on; accuracies, "down" and "up" bytes and "seconds" of a
    round.
    """

    path: Path
    method: str
    setting: tuple[tuple[str, Any], ...]  # the run's flags that are not the defaults
    seed: int
    values: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """One method in one setting. std is the sample standard deviation, NaN for a single seed."""

    method: str
    setting: tuple[tuple[str, Any], ...]
    seeds: tuple[int, ...]
    mean: dict[str, float]
    std: dict[str, float]


def find(paths: Iterable[Path]) -> list[Path]:
    """All results.h5 in or below the given folders, sorted.

    Raises:
        ValueError: there are none below one of them.
    """
    found: list[Path] = []
    for path in paths:
        here = sorted(path.rglob("results.h5")) if path.is_dir() else []
        if not here:
            raise ValueError(f"{path} holds no results.h5: name the folders of runs or of a sweep")
        found += here
    return sorted(dict.fromkeys(found))


def read(path: Path) -> Run | None:
    """One run's outcome; None if it has not finished."""
    with h5py.File(path, "r", locking=False) as h5:
        if h5.attrs["status"] != "finished":
            return None
        config = json.loads(h5.attrs["config"])
        values: dict[str, float] = {}
        for point in POINTS:
            for metric in METRICS:
                series = h5[f"accuracy/{point}/{metric}"][:]
                values |= _last_and_best(f"{point}/{{}}/{metric}", series)
        for way in ("down", "up"):
            values[way] = float(h5[f"bytes/{way}"][:].sum(axis=1).mean())
        values["seconds"] = float(np.nansum(h5["seconds/compute"][:], axis=1).mean())
    return Run(path, method_name(config), _setting(config), config["seed"], values)


def method_name(config: dict[str, Any]) -> str:
    """The strategy, with its own flags that differ from the defaults: fedapa:eta=0.1."""
    Method = strategies.config_class(config["strategy"])
    preset = config.get("preset", "paper")
    base = {**_defaults(Method), **getattr(Method, "PRESETS", {}).get(preset, {})}
    flags = [] if preset == "paper" else [f"preset={preset}"]
    flags += [
        f"{name}={_text(config[name])}"
        for name in field_names(Method)
        if name != "preset" and config[name] != base[name]
    ]
    return config["strategy"] + (":" + ",".join(flags) if flags else "")


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary per setting and method, in the order in which settings and methods appear."""
    groups: dict[tuple[Any, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.method), []).append(run)
    return [_summary(method, setting, group) for (setting, method), group in groups.items()]


def _summary(method: str, setting: tuple[tuple[str, Any], ...], group: list[Run]) -> Summary:
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
    )


def _last_and_best(name: str, series: np.ndarray) -> dict[str, float]:
    known = series[~np.isnan(series)]
    last, best = (known[-1], known.max()) if len(known) else (np.nan, np.nan)
    return {name.format("last"): float(last), name.format("best"): float(best)}


def _setting(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What methods are compared under: the run's flags, without what a preset brings along."""
    Method = strategies.config_class(config["strategy"])
    preset = getattr(Method, "PRESETS", {}).get(config.get("preset", "paper"), {})
    defaults = _defaults(RunConfig)
    names = [n for n in field_names(RunConfig) if n not in INCIDENTAL and n not in preset]
    shown = ("dataset", "partition", "model", "clients", "rounds")
    return tuple((n, config[n]) for n in names if n in shown or config[n] != defaults[n])


def _defaults(config_class: type[Any]) -> dict[str, Any]:
    return {name: getattr(config_class, name) for name in field_names(config_class)}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Checks of single values of a configuration: each error names field, value and expectation."""

from __future__ import annotations

from collections.abc import Iterable


def need(condition: bool, field: str, value: object, expected: str) -> None:
    """Raises ValueError unless a condition on a field holds."""
    if not condition:
        raise ValueError(f"{field} is {value}, expected {expected}")


def at_least(field: str, value: int, least: int) -> None:
    """Raises ValueError for a value below the least."""
    need(value >= least, field, value, f"at least {least}")


def within(config: object, **intervals: str) -> None:
    """Raises ValueError unless each field of a config lies in its interval, such as ``"[0, 1)"``.

    None stands for a default that is worked out later, and passes.
    """
    for field, interval in intervals.items():
        value = getattr(config, field)
        if value is None:
            continue
        low, high = map(float, interval[1:-1].split(","))
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        need(above and below, field, value, f"a number in {interval}")  # NaN is in none


def one_of(field: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError for a value that is not known."""
    need(value in known, field, value, f"one of {', '.join(sorted(known))}")


def names_own_model(value: str) -> bool:
    """Whether a value looks like ``package.module:factory``; rank 0 looks later what it is."""
    module, _, factory = value.partition(":")
    words = module.split(".")
    return all(map(str.isidentifier, [*words, factory])) and words[-1] != "py"


def check_device(field: str, value: str, *others: str) -> None:
    """Raises ValueError for anything but cpu, cuda, cuda:N and the others."""
    kind, _, index = value.partition(":")
    good = value in ("cpu", "cuda", *others) or (kind == "cuda" and index.isdecimal())
    need(good, field, value, " or ".join((*others, "cpu", "cuda", "cuda:N")))

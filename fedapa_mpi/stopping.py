"""Why a run ends early: signals and the wall time set a flag, the round loop looks at it.

Only the standard library is imported, so that the handlers stand before torch and mpi4py load
(seconds during which a signal would still kill the rank). Handlers set plain attributes and
neither print nor lock: they may interrupt any line of the main thread, themselves included.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

GRACE = 240.0  # seconds from a request to the checkpoint
GRACE_TERM = 20.0  # the same after SIGTERM: SLURM and clouds kill some 30 s later
SAME_PRESS = 0.2  # seconds; one Ctrl-C may arrive twice, from the terminal and from mpirun

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """Whether this process was asked to stop, why and when.

    reason  "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "max_time", ...; None while nobody asked
    abort   what a second Ctrl-C calls; ends this process with status 130 unless replaced, as it
            must be under MPI, where all ranks have to go
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.abort: Callable[[], object] = partial(os._exit, 128 + signal.SIGINT)
        self._since = 0.0  # when it was asked first
        self._term: float | None = None  # when SIGTERM came first: its grace is shorter
        self._interrupt: float | None = None  # when the first Ctrl-C came

    def ask(self, reason: str) -> None:
        """Ask for a stop. The first reason stays; a later SIGTERM only shortens the grace."""
        now = time.monotonic()
        if reason == signal.SIGTERM.name and self._term is None:
            self._term = now
        if self.reason is None:
            # The time first: a handler that interrupts here must never find a reason without it.
            self._since = now
            self.reason = reason

    def asked(self) -> bool:
        """Whether anybody asked."""
        return self.reason is not None

    def expired(self, grace: float | None = None) -> bool:
        """Whether it is too late to finish the round.

        True when `grace` seconds have passed since the first request; None stands for 20 s after
        SIGTERM or 240 s after any other reason, whichever ends first.
        """
        if self.reason is None:
            return False
        deadline = self._since + (GRACE if grace is None else grace)
        if grace is None and self._term is not None:
            deadline = min(deadline, self._term + GRACE_TERM)
        return time.monotonic() >= deadline

    def interrupt(self) -> None:
        """Take note of a Ctrl-C: the first asks for a stop, the next one aborts."""
        now = time.monotonic()
        if self._interrupt is None:
            self._interrupt = now
            self.ask(signal.SIGINT.name)
        elif now >= self._interrupt + SAME_PRESS:
            self.abort()


def install(flag: StopFlag) -> None:
    """Let SIGTERM, SIGUSR1, SIGUSR2 and SIGINT set `flag`, however often they come.

    Must run in the main thread (ValueError otherwise, from `signal`).
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            flag.interrupt()
        else:
            flag.ask(signal.Signals(number).name)

    for number in SIGNALS:
        signal.signal(number, handle)


_DURATION = re.compile(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2}(?:\.[0-9]+)?)")


def parse_duration(text: str | float) -> float:
    """Seconds in "90", "1:30" (mm:ss), "2:00:00" (hh:mm:ss) or "1-12:00:00" (d-hh:mm:ss).

    As in SLURM, "1-12" and "1-12:30" are days with hours and minutes; unlike there, a bare number
    is seconds, and the last field may have decimals. Raises ValueError for anything else.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise _bad_duration(text)
    days = match[1]
    clock = [float(part) for part in match[2].split(":")]
    missing = [0.0] * (3 - len(clock))
    # After days the clock starts with hours; without them it ends with seconds.
    hours, minutes, seconds = missing + clock if days is None else clock + missing
    # Only the leading field may run over: 90:00 is fine, 1:90 is a slip of the pen.
    if any(part >= 60 for part in clock[1:]) or (days is not None and hours >= 24):
        raise _bad_duration(text)
    return float(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _bad_duration(text: str | float) -> ValueError:
    return ValueError(
        f"duration is {text!r}, expected seconds (90), mm:ss (1:30), hh:mm:ss (2:00:00) or "
        "d-hh:mm:ss (1-12:00:00)"
    )


class Abandoned(Exception):
    """The round under way is given up: too little time is left to finish it."""


class RankFailedError(RuntimeError):
    """Another rank failed; it has said why itself."""

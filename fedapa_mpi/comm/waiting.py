"""Waiting that leaves the cores to those who compute."""

from __future__ import annotations

import time

LONGEST_SLEEP = 0.02  # seconds
SHORTEST_SLEEP = 2e-5


class Wait:
    """A polite wait: each ``pause`` sleeps a tenth of the time waited so far, at most 20 ms."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the wait began or ``restart`` was called."""
        return time.perf_counter() - self._start

    def restart(self) -> None:
        """Something came: be quick again."""
        self._start = time.perf_counter()

    def pause(self) -> None:
        """Sleeps."""
        time.sleep(min(max(self.seconds / 10, SHORTEST_SLEEP), LONGEST_SLEEP))

"""Where a rank's time goes: named spans that add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SPANS = ("compute", "wait", "transfer", "server", "evaluation", "checkpoint")


class Clock:
    """Adds up seconds by name. Spans do not nest: the inner one's time is taken off the outer."""

    def __init__(self) -> None:
        self._total = dict.fromkeys(SPANS, 0.0)
        self._inner = 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Charges the block's wall time to ``name``, one of ``SPANS``."""
        outer, self._inner = self._inner, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._total[name] += elapsed - self._inner
            self._inner = outer + elapsed

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by name; starts again from zero."""
        total, self._total = self._total, dict.fromkeys(SPANS, 0.0)
        return total

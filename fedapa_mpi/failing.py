"""When something goes wrong on a rank: say it once, with its place, then end the whole job.

Without this the other ranks would wait for ever: an uncaught exception lets a rank end in
MPI_Finalize, which waits for all of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from fedapa_mpi.comm.world import World
from fedapa_mpi.stopping import RankFailedError

PATIENCE = 5.0  # seconds that a failing rank gives others to end things in order


@dataclass
class Place:
    """What this process is working on, for error messages."""

    rank: int = 0
    client: int | None = None
    round: int = 0

    def __str__(self) -> str:
        client = "" if self.client is None else f", client {self.client}"
        return f"rank {self.rank}{client}, round {self.round}"


class Guard:
    """Ends the job on any error of this rank, in any thread.

    ``tell`` is called with one line about the error before the end: rank 0 writes the run's
    status, another rank tells rank 0.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ending = threading.Lock()
        self.place = Place(world.rank)
        self.tell: Callable[[str], None] = lambda text: None
        threading.excepthook = lambda args: self.fail(args.exc_value or SystemExit())

    def fail(self, error: BaseException) -> None:
        """Says what happened and ends every rank. Does not return."""
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * PATIENCE)  # another thread is at it, and ends this one too
        if not isinstance(error, RankFailedError):
            print(f"fedapa-mpi: error on {self.place}:", file=sys.stderr)
            traceback.print_exception(error)
            sys.stderr.flush()
        sys.stdout.flush()
        try:
            self.tell(self.line(error))
        finally:
            self._world.abort(1)
            os._exit(1)  # in case an abort returns

    def line(self, error: BaseException) -> str:
        """What happened and where, on one line."""
        if isinstance(error, RankFailedError):
            return str(error)  # the rank that failed has said where
        return f"{self.place}: {type(error).__name__}: {error}"


def refuse(error: Exception, rank: int = 0) -> int:
    """Says once why a request cannot be carried out; returns the exit status.

    2 on rank 0, 0 elsewhere: Open MPI ends a launch at the first nonzero status, maybe before
    rank 0 has printed.
    """
    if rank:
        return 0
    print(f"fedapa-mpi: error: {error}", file=sys.stderr, flush=True)
    return 2

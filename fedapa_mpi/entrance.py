"""How a command enters a launch: handlers, command line, MPI, then this rank's part.

Only the standard library is imported up here, and the signal handlers come first: a signal that
arrives while mpi4py and torch load would otherwise kill the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedapa_mpi.comm.world import World
    from fedapa_mpi.failing import Guard
    from fedapa_mpi.stopping import StopFlag


def enter(
    argv: Sequence[str] | None,
    read: Callable[[Sequence[str]], Any],
    lead: Callable[[Any, World, StopFlag, Guard], int],
) -> int:
    """Reads the command line on every rank, starts MPI if need be, and runs this rank's part.

    Args:
        argv: the words after the command; None: the process's own.
        read: makes a request of them, without torch; raises ValueError, or cli.Finished.
        lead: what rank 0 does. It calls ``world.agree(True)`` before each run, in which the other
            ranks then follow.

    Returns:
        The exit status: 0, or 2 on rank 0 for a request that cannot be carried out. Such an error
        is said once, and the other ranks return 0, because Open MPI ends a launch at the first
        nonzero status, maybe before rank 0 has printed.
    """
    from fedapa_mpi.stopping import StopFlag, install

    flag = StopFlag()
    install(flag)
    for pool in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
        os.environ[f"{pool}_NUM_THREADS"] = "1"  # --threads raises torch's, once it is known
    from fedapa_mpi import cli, failing, log
    from fedapa_mpi.comm import launcher, world

    rank = 0
    try:
        rank = launcher.declared_rank()
        request = read(sys.argv[1:] if argv is None else argv)
        here = world.connect()
    except cli.Finished as answer:
        if rank == 0:
            print(answer.text, flush=True)
        return 0
    except (ValueError, RuntimeError) as error:
        return failing.refuse(error, rank)
    guard = failing.Guard(here)
    flag.abort = lambda: here.abort(130)
    log.set_up(here.rank, here.size)
    try:
        if here.rank:
            return _follow(here, flag, guard)
        status = lead(request, here, flag, guard)
        here.agree(False)  # there is nothing more to run
    except BaseException as error:  # sys.exit in a user's code included
        guard.fail(error)
        raise
    return status


def _follow(here: World, flag: StopFlag, guard: Guard) -> int:
    """Any other rank: before each run it waits for rank 0's word, then holds clients and obeys."""
    while here.agree(True):
        from fedapa_mpi import following

        following.follow(here, flag, guard)
    return 0

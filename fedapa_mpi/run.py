"""Runs one experiment: ``mpirun -n 21 python -m fedapa_mpi.run [STRATEGY] [--FLAG VALUE ...]``.

Rank 0 is the server, the other ranks hold the clients; without mpirun one process is both. Only
the standard library is imported up here: ``main`` starts with the signal handlers, because a
signal that comes while mpi4py and torch load would otherwise kill the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapa_mpi.cli import Request
    from fedapa_mpi.comm.world import World
    from fedapa_mpi.failing import Guard
    from fedapa_mpi.stopping import StopFlag


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, starts MPI if need be and runs this rank's part.

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
    from fedapa_mpi import cli, failing
    from fedapa_mpi.comm import launcher, world

    rank = 0
    try:
        rank = launcher.declared_rank()
        request = cli.read(sys.argv[1:] if argv is None else argv)
        here = world.connect()
    except cli.Finished as answer:
        return _answer(answer.text, rank)
    except (ValueError, RuntimeError) as error:
        return failing.refuse(error, rank)
    guard = failing.Guard(here)
    flag.abort = lambda: here.abort(130)
    try:
        return _lead(request, here, flag, guard) if here.rank == 0 else _follow(here, flag, guard)
    except BaseException as error:  # sys.exit in a user's code included
        guard.fail(error)
        raise


def _lead(request: Request, here: World, flag: StopFlag, guard: Guard) -> int:
    """Rank 0 settles what is to run before anybody spends seconds on importing torch."""
    from fedapa_mpi import failing, log, start

    log.set_up(here.rank, here.size)
    try:
        settled = start.settle(request)
    except (ValueError, OSError) as error:
        here.agree(False)
        return failing.refuse(error)
    here.agree(not settled.over)
    if settled.over:
        return _answer(
            f"{settled.folder.path} is finished: {settled.experiment.run.rounds} rounds are done; "
            f"ask for more with --rounds",
            here.rank,
        )
    from fedapa_mpi import leading

    return leading.lead(settled, request.dry_run, here, flag, guard)


def _follow(here: World, flag: StopFlag, guard: Guard) -> int:
    """Any other rank waits for rank 0's word, then holds clients and obeys its orders."""
    from fedapa_mpi import log

    log.set_up(here.rank, here.size)
    if here.agree(True):
        from fedapa_mpi import following

        following.follow(here, flag, guard)
    return 0


def _answer(text: str, rank: int) -> int:
    if rank == 0:
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

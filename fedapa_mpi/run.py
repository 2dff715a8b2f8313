"""Runs one experiment: ``mpirun -n 21 python -m fedapa_mpi.run [STRATEGY] [--FLAG VALUE ...]``.

Rank 0 is the server, the other ranks hold the clients; without mpirun one process is both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapa_mpi.cli import Request
    from fedapa_mpi.comm.world import World
    from fedapa_mpi.failing import Guard
    from fedapa_mpi.stopping import StopFlag


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the words after the command ask for; returns the exit status of this rank."""
    from fedapa_mpi import entrance

    return entrance.enter(argv, _read, _lead)


def _read(argv: Sequence[str]) -> Request:
    from fedapa_mpi import cli

    return cli.read(argv)


def _lead(request: Request, here: World, flag: StopFlag, guard: Guard) -> int:
    """Rank 0 settles what is to run before anybody spends seconds on importing torch."""
    from fedapa_mpi import failing, start

    try:
        settled = start.settle(request)
    except (ValueError, OSError) as error:
        return failing.refuse(error)
    if settled.over:
        print(
            f"{settled.folder.path} is finished: {settled.experiment.run.rounds} rounds are done; "
            f"ask for more with --rounds",
            flush=True,
        )
        return 0
    here.agree(True)
    from fedapa_mpi import leading

    return leading.lead(settled, here, flag, guard, dry_run=request.dry_run)


if __name__ == "__main__":
    sys.exit(main())

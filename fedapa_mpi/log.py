"""Logging of one rank: rank 0 tells what happens, the others only what is wrong."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("fedapa_mpi")


def set_up(rank: int, size: int) -> None:
    """Sends this rank's lines to stderr; in a launch of several they begin with the rank."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if size > 1 else ""
    handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s: %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)

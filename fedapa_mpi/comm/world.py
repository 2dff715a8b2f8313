"""The ranks of a launch before any message can be sent: who is there, and do we start?"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from fedapa_mpi.comm.launcher import check_world, launched
from fedapa_mpi.comm.waiting import Wait


@dataclass(frozen=True)
class World:
    """This rank among all. ``comm`` is None when one process runs without MPI.

    node: the lowest rank on this rank's shared-memory node, which tells nodes apart (host names
    may repeat, and the launchers' local-rank variables are wrong under some mpiruns).
    library: the MPI library's name and version, "none" without MPI.
    """

    comm: Any
    rank: int
    size: int
    node: int
    host: str
    library: str = "none"

    def agree(self, go: bool) -> bool:
        """Rank 0's word whether to go on, said to all before torch is imported."""
        if self.size == 1:
            return go
        word = bytearray([go])
        request = self.comm.Ibcast(word, root=0)
        wait = Wait()
        while not request.Test():
            wait.pause()
        return bool(word[0])

    def abort(self, code: int) -> None:
        """Ends every rank of the launch at once."""
        if self.comm is None:
            os._exit(code)
        self.comm.Abort(code)


def connect() -> World:
    """Starts MPI if a launcher started this process.

    Raises:
        ValueError: the launcher meant N processes and MPI sees N worlds of one.
        RuntimeError: mpi4py finds no MPI library.
    """
    if not launched():
        return World(None, 0, 1, 0, socket.gethostname())
    from mpi4py import MPI  # initialises MPI

    comm = MPI.COMM_WORLD
    check_world(comm.size)
    # blocking, but just after MPI's own start, where all ranks are together anyway
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.allreduce(comm.rank, op=MPI.MIN)
    node.Free()
    library = MPI.Get_library_version().splitlines()[0].strip("\0, ")
    return World(comm.Dup(), comm.rank, comm.size, lowest, socket.gethostname(), library)


def visible_devices() -> tuple[str, ...]:
    """This rank's GPUs as the launcher named them; empty without CUDA. Imports torch."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))

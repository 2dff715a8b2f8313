"""Sends one tensor above 2 GiB from rank 0 to rank 1 and back: ``mpirun -n 2 big_message.py``.

Takes about 9 GiB of memory. Prints the seconds of both ways.
"""

import sys
import time

import torch
from mpi4py import MPI

from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import Envelope, Kind
from fedapa_mpi.comm.transport import Transport

ELEMENTS = int(2.2 * 2**30) // 4
CHUNK = 1 << 24


def checked(envelope: Envelope) -> torch.Tensor:
    """The tensor, each of whose elements has arrived as it was sent."""
    x = envelope.tensors["x"]
    assert (x.dtype, x.shape) == (torch.float32, (ELEMENTS,))
    for start in range(0, ELEMENTS, CHUNK):
        part = x[start : start + CHUNK].view(torch.int32)
        assert torch.equal(part, torch.arange(start, start + len(part), dtype=torch.int32)), start
    return x


def there_and_back(transport: Transport) -> None:
    """Rank 0's part."""
    x = torch.arange(ELEMENTS, dtype=torch.int32).view(torch.float32)
    envelope = Envelope(Kind.DOWNLOAD, 0, 1, {"x": x})
    started = time.perf_counter()
    transport.post(envelope, 1)
    del envelope, x
    transport.flush()
    there = time.perf_counter()
    checked(transport.take(Kind.UPLOAD, 1))
    back = time.perf_counter()
    print(f"{ELEMENTS * 4} bytes: there {there - started:.1f} s, and back {back - there:.1f} s")


def reply(transport: Transport) -> None:
    """Rank 1's part."""
    x = checked(transport.take(Kind.DOWNLOAD, 0))
    transport.post(Envelope(Kind.UPLOAD, 0, 1, {"x": x}), 0)


def main() -> int:
    torch.set_num_threads(1)
    transport = Transport(MPI.COMM_WORLD, Clock())
    (reply if transport.rank else there_and_back)(transport)
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Random streams that are functions of (seed, client, round, purpose).

Nothing random is ever saved: whoever needs numbers asks for the stream by its name, so a
resumed run, another number of ranks and another order of clients draw the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SERVER = -1  # the client id under which streams common to all clients are drawn


def stream_seed(seed: int, client: int, t: int, purpose: str) -> int:
    """A 63-bit seed for one stream; ``client`` is ``SERVER`` for what all clients share."""
    digest = hashlib.sha256(f"{seed}/{client}/{t}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, client: int, t: int, purpose: str) -> torch.Generator:
    """A CPU generator at the start of its stream.

    On the CPU also when the client is on a GPU: batches then do not depend on the device.
    """
    return torch.Generator().manual_seed(stream_seed(seed, client, t, purpose))


@contextmanager
def seeded(
    seed: int, client: int, t: int, purpose: str, device: torch.device | None = None
) -> Iterator[None]:
    """Runs a block with torch's global generators at the start of a stream, then puts them back.

    A model that draws for itself (dropout, initialisation) is thereby repeatable as well.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        # torch.manual_seed reaches every kind of device there may be, a hundred times as slowly
        seeding = torch.manual_seed if devices else torch.default_generator.manual_seed
        seeding(stream_seed(seed, client, t, purpose))
        yield

"""What makes two federations equal: one hash of each client, and one over all of these."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np


def client_hash(arrays: Mapping[str, np.ndarray]) -> str:
    """Sha256 (hex) over names, dtypes, shapes and bytes, in the order given.

    `arrays` are a client's samples, labels, number of classes and normalisation (Shard.message).
    """
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.name} {list(array.shape)};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def federation_hash(hashes: Iterable[str]) -> str:
    """Sha256 (hex) over the clients' hashes, in client order."""
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

"""A synthetic federation with a known answer to "who belongs together".

G groups, each with its own class-conditional distributions in D dimensions: class c of group g is
normal around mean[g, c] ~ N(0, I). Nothing is shared between groups, and a client has too few
samples to learn its group's distributions alone, so it gains by learning with its own group only.

Every client has its own random stream and groups are dealt in turns of G clients, so that the first
clients of a larger federation are those of a smaller one.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

CLASSES, FEATURES = 10, 32
TEST_SAMPLES = 100  # of each client
_MEANS, _MEMBERS, _SAMPLES = 11, 12, 13  # random streams


@dataclass(frozen=True, eq=False)
class GroupData:
    """One client's samples and its group."""

    x: np.ndarray  # [n, D] float32
    y: np.ndarray  # [n] int64
    x_test: np.ndarray  # [n_test, D]
    y_test: np.ndarray  # [n_test]


def members(clients: int, groups: int, seed: int) -> np.ndarray:  # [M] int64
    """The group of each client; sizes differ by one at most."""
    turns = range(-(-clients // groups))
    dealt = [np.random.default_rng([seed, _MEMBERS, turn]).permutation(groups) for turn in turns]
    return np.concatenate(dealt)[:clients]


def draw(group: int, client: int, *, samples: int, noise: float, seed: int) -> GroupData:
    """The data of one client: `samples` for training and TEST_SAMPLES to test with."""
    means = np.random.default_rng([seed, _MEANS, group]).normal(size=(CLASSES, FEATURES))
    rng = np.random.default_rng([seed, _SAMPLES, client])
    y = rng.integers(CLASSES, size=samples + TEST_SAMPLES)
    x = means[y] + noise * rng.normal(size=(y.size, FEATURES))
    x = x.astype(np.float32)
    return GroupData(x[:samples], y[:samples], x[samples:], y[samples:])


def membership_hash(group_of: np.ndarray) -> str:
    """Sha256 (hex) of who is in which group: the partition of this data set."""
    return hashlib.sha256(b"groups" + group_of.astype("<i8").tobytes()).hexdigest()

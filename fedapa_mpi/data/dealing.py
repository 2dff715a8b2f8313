"""From shares to samples: what all partitions have in common, and the checks of their arguments.

Letters: M clients, C classes, N samples, n_c samples of class c.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

MAX_TRIES = (
    1000  # draws before a partition is refused; at M = 500, C = 10 that takes about two seconds
)
FRACTION_FLOOR = 16  # training samples that `fraction` leaves a client, where it has them
ASSIGNMENTS = ("block", "random")


class Purpose(IntEnum):
    """Separates the random streams, so that e.g. another alpha leaves the shuffling as it was."""

    PROPORTIONS = 1
    TRAIN_ORDER = 2
    TEST_ORDER = 3
    ASSIGNMENT = 4
    FRACTION = 5
    TEST_SPLIT = 6


@dataclass(frozen=True, eq=False)
class Partition:
    """Each client's samples, as int64 indices into the data set's training and test samples.

    With `merged` both are indices into one sequence, the training samples followed by the test
    samples. The order is the drawn one and belongs to the partition: batches depend on it.
    """

    train: tuple[np.ndarray, ...]  # M arrays [n_i]
    test: tuple[np.ndarray, ...]  # M arrays
    merged: bool = False

    def sources(self, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the indices of `self.train` and of `self.test` refer to: samples, or labels."""
        if not self.merged:
            return train, test
        together = np.concatenate([train, test])
        return together, together

    def hash(self) -> str:
        """Sha256 (hex) over number of clients, sizes and indices; stored with every result."""
        kind = b"merged partition" if self.merged else b"partition"
        digest = hashlib.sha256(b"%s %d" % (kind, len(self.train)))
        for part in self.train + self.test:
            digest.update(b" %d:" % part.size)
            digest.update(part.astype("<i8").tobytes())  # the same hash on every byte order
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `partition.split` that a rule needs, checked."""

    train_labels: np.ndarray  # [N] int64
    test_labels: np.ndarray  # [N_test] int64
    clients: int
    seed: int
    alpha: float = 0.1
    classes_per_client: int = 2
    assignment: str = "block"
    balance: bool = True
    min_train: int = 1
    min_test: int = 1

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def classes(self) -> int:
        """C: labels are 0..C-1, whichever of the two sets holds the largest."""
        return 1 + int(max(self.train_labels.max(), self.test_labels.max(initial=0)))

    def generator(self, purpose: Purpose, *more: int) -> np.random.Generator:
        """An independent stream for each purpose."""
        return np.random.default_rng([self.seed, purpose, *more])


# ---------------------------------------------------------------------------- shares to samples


def accepted_counts(
    request: Request, draw: Callable[[], np.ndarray], name: str, cure: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw proportions until nobody gets too little; the train and test counts, each [C, M].

    Decided from counts alone: no index list is built for a draw that is thrown away.
    """
    n_train = np.bincount(request.train_labels, minlength=request.classes)
    n_test = np.bincount(request.test_labels, minlength=request.classes)

    def drawn() -> tuple[np.ndarray, np.ndarray]:
        proportions = draw()
        return floor_counts(proportions, n_train), floor_counts(proportions, n_test)

    return first_accepted(request, drawn, name, cure)


def first_accepted(
    request: Request,
    draw: Callable[[], tuple[np.ndarray, np.ndarray]],
    name: str,
    cure: str,
    least: int = 0,
    tries: int = MAX_TRIES,
) -> tuple[np.ndarray, np.ndarray]:
    """The first draw of train and test counts, each [classes or 1, M], that gives all enough.

    Enough is `min_train`, `min_test` and, of both together, `least`. Raises ValueError with what
    the best of `tries` draws lacked and `cure`.
    """
    best: tuple[np.ndarray, np.ndarray] | None = None
    fewest = math.inf
    for _ in range(tries):
        counts = draw()
        lacking = _lacking(request, *counts, least).sum()
        if lacking == 0:
            return counts
        if lacking < fewest:
            best, fewest = counts, lacking
    assert best is not None
    draws = f"none of {tries} draws gave" if tries > 1 else "its rule does not give"
    raise ValueError(f"{name} partition: {draws} {_shortage(request, *best, least)}: {cure}")


def floor_counts(proportions: np.ndarray, n: np.ndarray) -> np.ndarray:
    """floor(P[c, i] * n_c) as [C, M] int64; the remainder of a class is given to nobody.

    The 1e-9 is far above the rounding error of the product and lets 0.29 * 100 = 28.999... count as
    29; M of them stay below 1, so a class never hands out more than it has.
    """
    return np.floor(proportions * n[:, None] + 1e-9).astype(np.int64)


def _shortage(request: Request, train: np.ndarray, test: np.ndarray, least: int) -> str:
    """What the best draw lacked, for the error message."""
    lacking = _lacking(request, train, test, least)
    poorest = int(lacking.argmax())
    total = f" ({least} together)" if least > request.min_train + request.min_test else ""
    return (
        f"each of {request.clients} clients at least "
        f"{request.min_train} training and {request.min_test} test samples{total}; in the best one "
        f"{np.count_nonzero(lacking)} got too little, the poorest, client {poorest}, "
        f"{train[:, poorest].sum()} training and {test[:, poorest].sum()} test samples"
    )


def _lacking(
    request: Request, train: np.ndarray, test: np.ndarray, least: int
) -> np.ndarray:  # [M]
    """How many samples each client is short of the minimum."""
    n, n_test = train.sum(0), test.sum(0)
    short = np.maximum(request.min_train - n, 0) + np.maximum(request.min_test - n_test, 0)
    return np.maximum(short, least - n - n_test)


def deal(request: Request, counts: tuple[np.ndarray, np.ndarray]) -> Partition:
    """Turn counts into indices, for the training and the test set."""
    train, test = counts
    return Partition(
        hand_out(request.train_labels, train, request.generator(Purpose.TRAIN_ORDER)),
        hand_out(request.test_labels, test, request.generator(Purpose.TEST_ORDER)),
    )


def hand_out(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Shuffle each class and give client i the next counts[c, i] samples of it."""
    pieces: list[list[np.ndarray]] = []
    for c, row in enumerate(counts):
        shuffled = rng.permutation(np.flatnonzero(labels == c))
        pieces.append(np.split(shuffled, np.cumsum(row))[:-1])  # the last piece is the remainder
    return tuple(np.concatenate(column) for column in zip(*pieces))


def thin(partition: Partition, request: Request, fraction: float) -> Partition:
    """Keep a random part of every client's training samples; the test samples stay."""
    if fraction == 1:
        return partition
    kept = []
    for client, part in enumerate(partition.train):
        rng = request.generator(Purpose.FRACTION, client)
        size = max(FRACTION_FLOOR, math.floor(fraction * part.size + 1e-9))
        # The head of one permutation: a larger fraction contains the smaller one.
        kept.append(rng.permutation(part)[:size])
    return replace(partition, train=tuple(kept))


# ---------------------------------------------------------------------------- checks


def _check_numbers(request: Request) -> None:
    """Refuse values that no data set could make sense of."""
    if request.clients < 1:
        raise ValueError(f"--clients is {request.clients}: at least 1 is needed")
    if request.seed < 0:
        raise ValueError(f"--seed is {request.seed}: choose 0 or a positive number")
    if not 0 < request.alpha < math.inf:
        raise ValueError(f"--alpha is {request.alpha}: choose a finite number above 0")
    if request.assignment not in ASSIGNMENTS:
        choices = ", ".join(ASSIGNMENTS)
        raise ValueError(f"--assignment is {request.assignment!r}: choose one of {choices}")
    for flag, least in (("--min_train", request.min_train), ("--min_test", request.min_test)):
        if least < 0:
            raise ValueError(f"{flag} is {least}: choose 0 (no minimum) or a positive number")


def check_classes_per_client(request: Request) -> None:
    """Refuse a number of classes that the data set does not have."""
    if not 1 <= request.classes_per_client <= request.classes:
        raise ValueError(
            f"--classes_per_client is {request.classes_per_client}, but the data set has "
            f"{request.classes} classes: choose a number from 1 to {request.classes}"
        )


def checked_labels(labels: np.ndarray, which: str) -> np.ndarray:
    """The labels as int64 [N]; refuses anything that is not a class number."""
    labels = np.asarray(labels)
    integers = np.issubdtype(labels.dtype, np.integer) or labels.size == 0
    if labels.ndim != 1 or not integers or labels.min(initial=0) < 0:
        raise ValueError(
            f"{which} labels have shape {labels.shape} and dtype {labels.dtype}: expected one "
            "class number (0, 1, ...) per sample"
        )
    if which == "training" and labels.size == 0:
        raise ValueError("there is no training sample to divide: check the data set")
    return labels.astype(np.int64)


def check_enough(request: Request, merged: bool) -> None:
    """Refuse at once what no draw can satisfy."""
    train, test = request.train_labels.size, request.test_labels.size
    needs = [("train", train, request.min_train), ("test", test, request.min_test)]
    if merged:
        needs = [("train", (train + test) * 3 // 4, request.min_train)]
        needs.append(("test", train + test - (train + test) * 3 // 4, request.min_test))
    for which, have, least in needs:
        if request.clients * least > have:
            raise ValueError(
                f"{request.clients} clients with at least {least} {which} samples each need "
                f"{request.clients * least}, the data set has {have}: lower --clients or "
                f"--min_{which}"
            )

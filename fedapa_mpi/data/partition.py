"""Who gets which samples: pure functions from labels and a seed to index lists.

`pathological` and `dirichlet` follow FedAPA's public code (Sun et al., IJCAI 2025, arXiv
2502.07456): one matrix of proportions P [C, M] is applied to the original training set *and* to the
original test set. Here the samples of a class are shuffled first, and every repetition has a bound.

Letters: M clients, C classes, N samples, n_c samples of class c, k classes per client.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

MAX_TRIES = (
    1000  # draws before a partition is refused; at M = 500, C = 10 that takes about two seconds
)
FRACTION_FLOOR = 16  # training samples that `fraction` leaves a client, where it has them
ASSIGNMENTS = ("block", "random")


class _Purpose(IntEnum):
    """Separates the random streams, so that e.g. another alpha leaves the shuffling as it was."""

    PROPORTIONS = 1
    TRAIN_ORDER = 2
    TEST_ORDER = 3
    ASSIGNMENT = 4
    FRACTION = 5


@dataclass(frozen=True, eq=False)
class Partition:
    """Each client's samples, as int64 indices into the data set's training and test samples.

    The order is the drawn one and belongs to the partition: batches depend on it.
    """

    train: tuple[np.ndarray, ...]  # M arrays [n_i]
    test: tuple[np.ndarray, ...]  # M arrays

    def hash(self) -> str:
        """Sha256 (hex) over number of clients, sizes and indices; stored with every result."""
        digest = hashlib.sha256(b"partition %d" % len(self.train))
        for part in self.train + self.test:
            digest.update(b" %d:" % part.size)
            digest.update(part.astype("<i8").tobytes())  # the same hash on every byte order
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class _Request:
    """The arguments of `split` that a partition function needs, checked."""

    train_labels: np.ndarray  # [N] int64
    test_labels: np.ndarray  # [N_test] int64
    clients: int
    seed: int
    alpha: float
    classes_per_client: int
    assignment: str
    min_train: int
    min_test: int

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_enough(self)

    @property
    def classes(self) -> int:
        """C: labels are 0..C-1, whichever of the two sets holds the largest."""
        return 1 + int(max(self.train_labels.max(), self.test_labels.max(initial=0)))

    def generator(self, purpose: _Purpose, *more: int) -> np.random.Generator:
        """An independent stream for each purpose."""
        return np.random.default_rng([self.seed, purpose, *more])


def names() -> tuple[str, ...]:
    """The partitions that `split` knows."""
    return tuple(_RULES)


def split(
    name: str,
    train_labels: np.ndarray,  # [N]
    test_labels: np.ndarray,  # [N_test]
    *,
    clients: int,
    seed: int,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    assignment: str = "block",
    min_train: int = 1,
    min_test: int = 1,
    fraction: float = 1.0,
) -> Partition:
    """Divide a data set among `clients`; every sample goes to at most one of them.

    Equal arguments give the equal partition. `alpha` is used by dirichlet, `classes_per_client`
    and `assignment` by pathological. `min_train` and `min_test` hold before `fraction` thins the
    training data to floor(fraction * n_i) samples per client, not below 16 where a client has them.

    Raises ValueError for arguments out of range and when no acceptable partition was found.
    """
    if name not in _RULES:
        raise ValueError(f"unknown partition {name!r}: choose one of {', '.join(names())}")
    if not 0 < fraction <= 1:
        raise ValueError(f"--fraction is {fraction}: choose a number above 0 and at most 1")
    request = _Request(
        train_labels=_checked_labels(train_labels, "training"),
        test_labels=_checked_labels(test_labels, "test"),
        clients=clients,
        seed=seed,
        alpha=alpha,
        classes_per_client=classes_per_client,
        assignment=assignment,
        min_train=min_train,
        min_test=min_test,
    )
    return _thin(_RULES[name](request), request, fraction)


def class_counts(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each client holds: [M, C] int64.

    Raises ValueError if a label is not below `classes`.
    """
    if labels.size and labels.max() >= classes:
        raise ValueError(f"label {labels.max()} does not fit {classes} classes: pass classes > it")
    counts = np.zeros((len(parts), classes), np.int64)
    for row, part in zip(counts, parts):
        row += np.bincount(labels[part], minlength=classes)
    return counts


# ---------------------------------------------------------------------------- the partitions


def _pathological(request: _Request) -> Partition:
    """k classes per client; the holders of a class get U(0.3, 0.7) shares, normalised to 1."""
    if not 1 <= request.classes_per_client <= request.classes:
        raise ValueError(
            f"--classes_per_client is {request.classes_per_client}, but the data set has "
            f"{request.classes} classes: choose a number from 1 to {request.classes}"
        )
    holders = _block_holders(request) if request.assignment == "block" else _random_holders(request)
    rng = request.generator(_Purpose.PROPORTIONS)

    def draw() -> np.ndarray:
        shares = rng.uniform(0.3, 0.7, holders.shape) * holders
        total = shares.sum(1, keepdims=True)
        return shares / np.where(total > 0, total, 1)  # a class that nobody holds stays unused

    cure = (
        f"lower --clients (now {request.clients}), --min_train or --min_test, "
        f"or raise --classes_per_client (now {request.classes_per_client})"
    )
    return _deal(request, _accepted_counts(request, draw, "pathological", cure))


def _dirichlet(request: _Request) -> Partition:
    """Each class's proportions over the clients are Dirichlet(alpha * 1_M), independently."""
    rng = request.generator(_Purpose.PROPORTIONS)
    # Above 1e300 numpy's sum of M gammas overflows; shares equal 1/M to the last bit long before.
    concentration = np.full(request.clients, min(request.alpha, 1e300))

    def draw() -> np.ndarray:
        return rng.dirichlet(concentration, size=request.classes)

    cure = (
        f"raise --alpha (now {request.alpha:g}), or lower --clients (now {request.clients}), "
        "--min_train or --min_test"
    )
    return _deal(request, _accepted_counts(request, draw, "dirichlet", cure))


def _iid(request: _Request) -> Partition:
    """All samples, in random order, cut into M parts whose sizes differ by one at most.

    No retries: `_check_enough` has seen that floor(N / M), the smallest part, is large enough.
    """
    train = request.generator(_Purpose.TRAIN_ORDER).permutation(request.train_labels.size)
    test = request.generator(_Purpose.TEST_ORDER).permutation(request.test_labels.size)
    return Partition(
        tuple(np.array_split(train, request.clients)), tuple(np.array_split(test, request.clients))
    )


_RULES: dict[str, Callable[[_Request], Partition]] = {
    "pathological": _pathological,
    "dirichlet": _dirichlet,
    "iid": _iid,
}


# ---------------------------------------------------------------------------- who holds which class


def _block_holders(request: _Request) -> np.ndarray:  # [C, M] bool
    """The authors' form: class after class goes to the lowest client ids with quota left.

    At most q = floor(M * k / C) clients hold a class, so clients come in identical blocks of q.
    """
    m, k, c = request.clients, request.classes_per_client, request.classes
    most = m * k // c
    if most == 0:
        raise ValueError(
            f"pathological partition: {m} clients with {k} classes each cannot cover {c} classes, "
            "the block assignment would give nothing to anybody: raise --clients or "
            "--classes_per_client, or use --assignment random"
        )
    quota = np.full(m, k)
    holders = np.zeros((c, m), bool)
    for row in holders:
        chosen = np.flatnonzero(quota)[:most]
        row[chosen] = True
        quota[chosen] -= 1
    _check_quota(request, quota)
    return holders


def _check_quota(request: _Request, quota: np.ndarray) -> None:
    """Refuse a block structure that leaves clients short; drawing again would not change it."""
    short = np.flatnonzero(quota)
    if short.size == 0 or (request.min_train == 0 and request.min_test == 0):
        return
    m, k, c = request.clients, request.classes_per_client, request.classes
    got = ", ".join(f"client {i} gets {k - quota[i]}" for i in short[:5])
    more = f" and {short.size - 5} more" if short.size > 5 else ""
    if c % k:
        cure = f"choose --classes_per_client among the divisors of {c}"
    else:
        step = c // k
        near = [n for n in (m // step * step, (m // step + 1) * step) if n]
        cure = f"choose --clients as a multiple of {step} (e.g. {' or '.join(map(str, near))})"
    raise ValueError(
        f"pathological partition: blocks of {m * k // c} clients with {k} of {c} classes do not "
        f"fit {m} clients: of {k} classes {got}{more}; {cure}, or use --assignment random, or "
        "accept such clients with --min_train 0 --min_test 0"
    )


def _random_holders(request: _Request) -> np.ndarray:  # [C, M] bool
    """Each client in turn takes k of the classes least used so far, ties broken at random."""
    rng = request.generator(_Purpose.ASSIGNMENT)
    used = np.zeros(request.classes, np.int64)
    holders = np.zeros((request.classes, request.clients), bool)
    for client in range(request.clients):
        chosen = np.lexsort((rng.random(used.size), used))[: request.classes_per_client]
        holders[chosen, client] = True
        used[chosen] += 1
    return holders


# ---------------------------------------------------------------------------- shares to samples


def _accepted_counts(
    request: _Request, draw: Callable[[], np.ndarray], name: str, cure: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw proportions until nobody gets too little; the train and test counts, each [C, M].

    Decided from counts alone: no index list is built for a draw that is thrown away.
    """
    n_train = np.bincount(request.train_labels, minlength=request.classes)
    n_test = np.bincount(request.test_labels, minlength=request.classes)
    best: tuple[np.ndarray, np.ndarray] | None = None
    fewest = math.inf
    for _ in range(MAX_TRIES):
        proportions = draw()
        counts = _counts(proportions, n_train), _counts(proportions, n_test)
        lacking = _lacking(request, *counts).sum()
        if lacking == 0:
            return counts
        if lacking < fewest:
            best, fewest = counts, lacking
    assert best is not None
    raise ValueError(f"{name} partition: {_shortage(request, *best)}: {cure}")


def _shortage(request: _Request, train: np.ndarray, test: np.ndarray) -> str:
    """What the best draw lacked, for the error message."""
    lacking = _lacking(request, train, test)
    poorest = int(lacking.argmax())
    return (
        f"none of {MAX_TRIES} draws gave each of {request.clients} clients at least "
        f"{request.min_train} training and {request.min_test} test samples; in the best one "
        f"{np.count_nonzero(lacking)} got too little, the poorest, client {poorest}, "
        f"{train[:, poorest].sum()} training and {test[:, poorest].sum()} test samples"
    )


def _counts(proportions: np.ndarray, n: np.ndarray) -> np.ndarray:
    """floor(P[c, i] * n_c) as [C, M] int64; the remainder of a class is given to nobody.

    The 1e-9 is far above the rounding error of the product and lets 0.29 * 100 = 28.999... count as
    29; M of them stay below 1, so a class never hands out more than it has.
    """
    return np.floor(proportions * n[:, None] + 1e-9).astype(np.int64)


def _lacking(request: _Request, train: np.ndarray, test: np.ndarray) -> np.ndarray:  # [M]
    """How many samples each client is short of the minimum."""
    return np.maximum(request.min_train - train.sum(0), 0) + np.maximum(
        request.min_test - test.sum(0), 0
    )


def _deal(request: _Request, counts: tuple[np.ndarray, np.ndarray]) -> Partition:
    """Turn counts into indices, for the training and the test set."""
    train, test = counts
    return Partition(
        _hand_out(request.train_labels, train, request.generator(_Purpose.TRAIN_ORDER)),
        _hand_out(request.test_labels, test, request.generator(_Purpose.TEST_ORDER)),
    )


def _hand_out(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Shuffle each class and give client i the next counts[c, i] samples of it."""
    pieces: list[list[np.ndarray]] = []
    for c, row in enumerate(counts):
        shuffled = rng.permutation(np.flatnonzero(labels == c))
        pieces.append(np.split(shuffled, np.cumsum(row))[:-1])  # the last piece is the remainder
    return tuple(np.concatenate(column) for column in zip(*pieces))


def _thin(partition: Partition, request: _Request, fraction: float) -> Partition:
    """Keep a random part of every client's training samples; the test samples stay."""
    if fraction == 1:
        return partition
    kept = []
    for client, part in enumerate(partition.train):
        rng = request.generator(_Purpose.FRACTION, client)
        size = max(FRACTION_FLOOR, math.floor(fraction * part.size + 1e-9))
        # The head of one permutation: a larger fraction contains the smaller one.
        kept.append(rng.permutation(part)[:size])
    return replace(partition, train=tuple(kept))


# ---------------------------------------------------------------------------- checks


def _check_numbers(request: _Request) -> None:
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


def _checked_labels(labels: np.ndarray, which: str) -> np.ndarray:
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


def _check_enough(request: _Request) -> None:
    """Refuse at once what no draw can satisfy."""
    for which, have, least in (
        ("train", request.train_labels.size, request.min_train),
        ("test", request.test_labels.size, request.min_test),
    ):
        if request.clients * least > have:
            raise ValueError(
                f"{request.clients} clients with at least {least} {which} samples each need "
                f"{request.clients * least}, the data set has {have}: lower --clients or "
                f"--min_{which}"
            )

"""Who gets which samples: pure functions from labels and a seed to index lists.

`pathological` and `dirichlet` follow FedAPA's public code (Sun et al., IJCAI 2025, arXiv
2502.07456): one matrix of proportions P [C, M] is applied to the original training set *and* to the
original test set. Here the samples of a class are shuffled first, and every repetition has a bound.
`pfllib-pat` and `pfllib-dir` are in pfllib.py.

Letters: M clients, C classes, N samples, n_c samples of class c, k classes per client.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fedapa_mpi.data import pfllib
from fedapa_mpi.data.dealing import (
    ASSIGNMENTS,
    Partition,
    Purpose,
    Request,
    accepted_counts,
    check_classes_per_client,
    check_enough,
    checked_labels,
    deal,
    thin,
)

__all__ = ["ASSIGNMENTS", "Partition", "class_counts", "names", "split"]


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
    balance: bool = True,
    min_train: int = 1,
    min_test: int = 1,
    fraction: float = 1.0,
) -> Partition:
    """Divide a data set among `clients`; every sample goes to at most one of them.

    Equal arguments give the equal partition. `alpha` is used by dirichlet and pfllib-dir,
    `classes_per_client` by pathological and pfllib-pat, `assignment` by pathological, `balance` by
    pfllib-pat. `min_train` and `min_test` hold before `fraction` thins the training data to
    floor(fraction * n_i) samples per client, not below 16 where a client has them.

    Raises ValueError for arguments out of range and when no acceptable partition was found.
    """
    if name not in _RULES:
        raise ValueError(f"unknown partition {name!r}: choose one of {', '.join(names())}")
    if not 0 < fraction <= 1:
        raise ValueError(f"--fraction is {fraction}: choose a number above 0 and at most 1")
    request = Request(
        train_labels=checked_labels(train_labels, "training"),
        test_labels=checked_labels(test_labels, "test"),
        clients=clients,
        seed=seed,
        alpha=alpha,
        classes_per_client=classes_per_client,
        assignment=assignment,
        balance=balance,
        min_train=min_train,
        min_test=min_test,
    )
    check_enough(request, merged=name.startswith("pfllib"))
    return thin(_RULES[name](request), request, fraction)


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


def _pathological(request: Request) -> Partition:
    """k classes per client; the holders of a class get U(0.3, 0.7) shares, normalised to 1."""
    check_classes_per_client(request)
    holders = _block_holders(request) if request.assignment == "block" else _random_holders(request)
    rng = request.generator(Purpose.PROPORTIONS)

    def draw() -> np.ndarray:
        shares = rng.uniform(0.3, 0.7, holders.shape) * holders
        total = shares.sum(1, keepdims=True)
        return shares / np.where(total > 0, total, 1)  # a class that nobody holds stays unused

    cure = (
        f"lower --clients (now {request.clients}), --min_train or --min_test, "
        f"or raise --classes_per_client (now {request.classes_per_client})"
    )
    return deal(request, accepted_counts(request, draw, "pathological", cure))


def _dirichlet(request: Request) -> Partition:
    """Each class's proportions over the clients are Dirichlet(alpha * 1_M), independently."""
    rng = request.generator(Purpose.PROPORTIONS)
    # Above 1e300 numpy's sum of M gammas overflows; shares equal 1/M to the last bit long before.
    concentration = np.full(request.clients, min(request.alpha, 1e300))

    def draw() -> np.ndarray:
        return rng.dirichlet(concentration, size=request.classes)

    cure = (
        f"raise --alpha (now {request.alpha:g}), or lower --clients (now {request.clients}), "
        "--min_train or --min_test"
    )
    return deal(request, accepted_counts(request, draw, "dirichlet", cure))


def _iid(request: Request) -> Partition:
    """All samples, in random order, cut into M parts whose sizes differ by one at most.

    No retries: `check_enough` has seen that floor(N / M), the smallest part, is large enough.
    """
    train = request.generator(Purpose.TRAIN_ORDER).permutation(request.train_labels.size)
    test = request.generator(Purpose.TEST_ORDER).permutation(request.test_labels.size)
    return Partition(
        tuple(np.array_split(train, request.clients)), tuple(np.array_split(test, request.clients))
    )


_RULES: dict[str, Callable[[Request], Partition]] = {
    "pathological": _pathological,
    "dirichlet": _dirichlet,
    "iid": _iid,
    "pfllib-pat": pfllib.pat,
    "pfllib-dir": pfllib.dirichlet,
}


# ---------------------------------------------------------------------------- who holds which class


def _block_holders(request: Request) -> np.ndarray:  # [C, M] bool
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


def _check_quota(request: Request, quota: np.ndarray) -> None:
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


def _random_holders(request: Request) -> np.ndarray:  # [C, M] bool
    """Each client in turn takes k of the classes least used so far, ties broken at random."""
    rng = request.generator(Purpose.ASSIGNMENT)
    used = np.zeros(request.classes, np.int64)
    holders = np.zeros((request.classes, request.clients), bool)
    for client in range(request.clients):
        chosen = np.lexsort((rng.random(used.size), used))[: request.classes_per_client]
        holders[chosen, client] = True
        used[chosen] += 1
    return holders

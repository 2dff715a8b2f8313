"""The partitions of PFLlib: training and test samples are merged, and divided once more per client.

J. Zhang et al., "PFLlib: A beginner-friendly and comprehensive personalized federated learning
library and benchmark", JMLR 26, 2025. Each client's share is shuffled; floor(0.75 n) of its samples
are for training, the rest for testing, whatever their classes.

Here every repetition has a bound, samples of a class are shuffled before they are dealt, and a draw
of proportions that would divide by zero falls back to equal shares of the clients with room.

Letters: M clients, C classes, N samples in both sets, n_c samples of class c, k classes per client.
"""

import numpy as np

from fedapa_mpi.data.dealing import (
    Partition,
    Purpose,
    Request,
    check_classes_per_client,
    first_accepted,
    hand_out,
)

LEAST = 40  # samples: PFLlib wants a batch of 10 in a quarter of them


def pat(request: Request) -> Partition:
    """k classes per client: class after class goes to the q = ceil(M k / C) lowest ids with room.

    Balanced: equal shares. Otherwise all holders but the last get a random integer from
    [max(share / 10, least / C), share). The last one gets what is left. With the rounding up, the
    last classes may go to nobody.
    """
    check_classes_per_client(request)
    rng = request.generator(Purpose.PROPORTIONS)
    most = -(-request.clients * request.classes_per_client // request.classes)
    quota = np.full(request.clients, request.classes_per_client)
    counts = np.zeros((request.classes, request.clients), np.int64)
    for row, n in zip(counts, _class_sizes(request)):
        chosen = np.flatnonzero(quota)[:most]
        if chosen.size:
            row[chosen] = _shares(request, int(n), chosen.size, rng)
        quota[chosen] -= 1
    cure = (
        f"lower --clients (now {request.clients}), --min_train or --min_test, or change "
        f"--classes_per_client (now {request.classes_per_client})"
    )
    first_accepted(request, lambda: _split(counts.sum(0)), "pfllib-pat", cure, tries=1)
    return _divided(request, counts)


def dirichlet(request: Request) -> Partition:
    """Each class's proportions are Dirichlet(alpha * 1_M) over the clients that hold below N / M.

    No sample is lost. Drawn again until the smallest client holds min(40, floor(N / M / 2)) and all
    have `min_train` and `min_test`.
    """
    rng = request.generator(Purpose.PROPORTIONS)
    n = _class_sizes(request)
    least = min(LEAST, int(n.sum()) // (2 * request.clients))
    counts = np.zeros((request.classes, request.clients), np.int64)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        counts[:] = 0
        for c in range(request.classes):
            p = rng.dirichlet(np.full(request.clients, min(request.alpha, 1e300)))
            counts[c] = _balanced_counts(p, counts.sum(0), n, c)
        return _split(counts.sum(0))

    cure = (
        f"raise --alpha (now {request.alpha:g}), or lower --clients (now {request.clients}), "
        "--min_train or --min_test"
    )
    first_accepted(request, draw, "pfllib-dir", cure, least=least)
    return _divided(request, counts)


def _class_sizes(request: Request) -> np.ndarray:  # [C]
    """n_c of both sets together."""
    together = np.concatenate([request.train_labels, request.test_labels])
    return np.bincount(together, minlength=request.classes)


def _shares(request: Request, n: int, holders: int, rng: np.random.Generator) -> list[int]:
    """How many of n samples of a class each of its holders gets; the last one gets the rest."""
    share, first = n // holders, holders - 1
    if request.balance:
        counts = [share] * first
    else:
        total = request.train_labels.size + request.test_labels.size
        least = min(LEAST, total // (2 * request.clients))
        low = min(max(n // (10 * holders), least // request.classes), max(share - 1, 0))
        counts = rng.integers(low, max(share, low + 1), first).tolist()
    return counts + [n - sum(counts)]


def _balanced_counts(p: np.ndarray, held: np.ndarray, n: np.ndarray, c: int) -> np.ndarray:  # [M]
    """The samples of class c for each client; those that hold N / M or more get none."""
    room = held * len(p) < n.sum()
    weights = p * room
    if not weights.sum() > 0:  # all of it fell on clients without room
        weights = room if room.any() else np.ones(len(p))
    cuts = np.floor(np.cumsum(weights / weights.sum()) * n[c] + 1e-9).astype(np.int64)
    cuts[-1] = n[c]
    return np.diff(np.minimum(cuts, n[c]), prepend=0)


def _split(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training and test samples of clients that hold `sizes` [M], each [1, M]."""
    train = sizes * 3 // 4
    return train[None], (sizes - train)[None]


def _divided(request: Request, counts: np.ndarray) -> Partition:
    """Turn counts [C, M] over both sets into a merged partition."""
    together = np.concatenate([request.train_labels, request.test_labels])
    train, test = [], []
    for client, part in enumerate(
        hand_out(together, counts, request.generator(Purpose.TRAIN_ORDER))
    ):
        mixed = request.generator(Purpose.TEST_SPLIT, client).permutation(part)
        border = mixed.size * 3 // 4
        train.append(mixed[:border])
        test.append(mixed[border:])
    return Partition(tuple(train), tuple(test), merged=True)

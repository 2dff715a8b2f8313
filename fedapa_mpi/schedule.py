"""Who takes part when: pure functions of the configuration and the round."""

from __future__ import annotations

import numpy as np

from fedapa_mpi.config import RunConfig

_SAMPLING, _DROPOUT = 1, 2  # which stream, so that the two are independent


def sampled(config: RunConfig, t: int) -> tuple[int, ...]:
    """The clients of round t in the order drawn.

    K is uniform over the integers from max(1, floor(low M)) to max(1, floor(high M)), then K
    distinct clients are drawn. The same for every strategy with the same seed.
    """
    fewest, most = bounds(config)
    draw = np.random.default_rng([config.seed, t, _SAMPLING])
    K = int(draw.integers(fewest, most, endpoint=True))
    return tuple(draw.permutation(config.clients)[:K].tolist())


def bounds(config: RunConfig) -> tuple[int, int]:
    """The smallest and the largest number K of clients that a round may sample."""
    M = config.clients
    # 0.29 * 100 is 28.999...
    low, high = (max(1, int(share * M + 1e-9)) for share in (config.join_low, config.join_high))
    return low, high


def participation(config: RunConfig) -> float:
    """The expected share of the clients that a round samples, E[K] / M."""
    return sum(bounds(config)) / 2 / config.clients


def dropped(config: RunConfig, t: int) -> frozenset[int]:
    """The clients that would fail to answer in round t, sampled or not."""
    if not config.dropout:
        return frozenset()
    draw = np.random.default_rng([config.seed, t, _DROPOUT])
    return frozenset(np.flatnonzero(draw.random(config.clients) < config.dropout).tolist())


def evaluated(config: RunConfig, t: int) -> bool:
    """Whether accuracy is measured in round t: every so many rounds, and in the last."""
    return t % config.eval_every == 0 or t == config.rounds

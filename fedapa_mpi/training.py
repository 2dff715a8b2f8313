"""What clients do with data: batches, the SGD loop that strategies share, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from fedapa_mpi.models import has_batchnorm

if TYPE_CHECKING:
    from fedapa_mpi.strategies.base import Client

EVALUATION_BATCH = 512


def batch_sizes(n: int, batch_size: int, drop_last: str, skip_single: bool = False) -> list[int]:
    """Sizes of an epoch's batches over n samples.

    ``drop_last``: "true" drops the incomplete batch, "false" keeps it, "auto" drops it unless it
    is the client's only one. ``skip_single`` leaves out a batch of one sample, in which
    BatchNorm has no variance.
    """
    full, rest = divmod(n, batch_size)
    sizes = [batch_size] * full
    if rest and (drop_last == "false" or (drop_last == "auto" and not full)):
        sizes.append(rest)
    return [size for size in sizes if size > 1 or not skip_single]


def batches(n: int, sizes: list[int], generator: torch.Generator) -> Iterator[Tensor]:
    """Index tensors of one epoch, drawn without replacement from range(n)."""
    yield from torch.randperm(n, generator=generator)[: sum(sizes)].split(sizes) if sizes else ()


def fit(
    client: Client,
    t: int,
    *,
    optimizer: Optimizer | None = None,
    epochs: int | None = None,
    purpose: str = "batches",
) -> float:
    """SGD on ``client.loss`` for E epochs; returns the mean loss over the steps.

    Args:
        optimizer: instead of ``client.optimizer``.
        epochs: instead of the configured E.
        purpose: name of the random stream that the batches come from.

    Returns:
        NaN when the client has too few samples for one step.
    """
    setup, x, y = client.setup, client.shard.x, client.shard.y
    optimizer = optimizer or client.optimizer
    skip_single = has_batchnorm(client.model)
    sizes = batch_sizes(len(y), setup.batch_size, setup.drop_last, skip_single)
    generator = setup.generator(t, purpose)
    total, steps = torch.zeros((), dtype=torch.float64, device=x.device), 0
    client.set_mode(training=True)
    for _ in range(setup.epochs if epochs is None else epochs):
        for batch in batches(len(y), sizes, generator):
            setup.poll()
            batch = batch.to(x.device)
            optimizer.zero_grad()
            loss = client.loss(x[batch], y[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
    return (total / steps).item() if steps else float("nan")


@torch.no_grad()
def evaluate(client: Client) -> Tensor:
    """Correct answers, samples and summed loss over the client's test set, float64 [V, 3].

    V: ``predict`` and each further way of answering that the client's ALSO names. NaN throughout
    for a client without test samples: its accuracy is not available.
    """
    x, y = client.shard.x_test, client.shard.y_test
    ways = [client.predict, *(getattr(client, f"predict_{name}") for name in client.ALSO)]
    if not len(y):
        return torch.full((len(ways), 3), torch.nan, dtype=torch.float64)
    client.set_mode(training=False)
    score = torch.zeros(len(ways), 3, dtype=torch.float64, device=x.device)
    for part, truth in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
        client.setup.poll()
        for way, predict in zip(score, ways, strict=True):
            answer = predict(part)
            way[0] += (answer.argmax(dim=1) == truth).sum()
            way[1] += len(truth)
            way[2] += F.cross_entropy(answer, truth, reduction="sum")
    return score.cpu()


@torch.no_grad()
def class_means(client: Client) -> dict[str, Tensor]:
    """Mean feature of each class that the client owns, over all its training samples.

    In evaluation mode and without dropping any sample.

    Returns:
        "mean" [m, D], "ids" [m] int64 of the classes, ascending, "count" [m] int64 of samples.
    """
    x, y = client.shard.x, client.shard.y
    client.set_mode(training=False)
    ids, counts = y.unique(return_counts=True)
    z = torch.cat([client.model.extractor(part) for part in x.split(EVALUATION_BATCH)])
    means = torch.stack([z[y == c].mean(dim=0) for c in ids]) if len(ids) else z[:0]
    return {"mean": means, "ids": ids, "count": counts}

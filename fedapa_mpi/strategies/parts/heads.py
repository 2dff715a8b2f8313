"""Which heads fit a client's data: the statistics and the quadratic programme of FedPAC."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedapa_mpi import training
from fedapa_mpi.strategies.base import Client, Messages

LEAST = 1e-3  # smaller shares of a head are dropped


@torch.no_grad()
def statistics(client: Client) -> tuple[Tensor, Tensor, Tensor]:
    """h [C, D], v [1] and the class means [C, D] of a client, worked out in float64.

    Over all its training samples, in evaluation mode; rows of classes that it lacks are 0.
    """
    x, y, n = client.shard.x, client.shard.y, max(client.shard.n, 1)
    client.set_mode(training=False)
    parts = x.split(training.EVALUATION_BATCH)
    z = torch.cat([client.model.extractor(part) for part in parts]).double()  # [n, D]
    owner = F.one_hot(y, client.setup.classes).double()  # [n, C]
    h = owner.T @ z / n  # [C, D]
    v = (z.square().sum() / n - h.square().sum()) / n
    means = h / (owner.sum(dim=0).clamp(min=1) / n)[:, None]
    return h.float(), v.clamp(min=0).float()[None], means.float()  # v < 0 is rounding


def combine(head: Tensor, uploads: Messages, n: Tensor) -> dict[int, Exception]:
    """phi_i = sum_j alpha_j phi_j in ``head`` [M, Q], over all who answered and have samples.

    Args:
        uploads: with "head" [Q], "h" [C, D] and "v" [1].
        n: samples of the clients, [M].

    Returns:
        The errors of clients without a solution, who keep their own head.
    """
    failed: dict[int, Exception] = {}
    for i, upload in uploads.items():
        head[i] = upload["head"]
    ids = [i for i in uploads if n[i]]
    if not ids:
        return failed
    phi = head[ids]  # [K, Q]
    h = torch.stack([uploads[i]["h"].flatten() for i in ids]).double()  # [K, C D]
    v = torch.cat([uploads[i]["v"] for i in ids]).double()  # [K]
    G = h @ h.T
    for k, i in enumerate(ids):
        try:
            head[i] = solve(programme(G, v, k)).to(phi) @ phi
        except (RuntimeError, ValueError) as error:  # what eigh and nnls raise
            failed[i] = error
    return failed


def programme(G: Tensor, v: Tensor, i: int) -> Tensor:
    """P_i [K, K] from the inner products G [K, K] of the h and from v [K], all float64."""
    P = v.diag() + G[i, i] - G[i][:, None] - G[i] + G
    return (P + P.T) / 2


def solve(P: Tensor) -> Tensor:
    """The alpha [K] >= 0 with sum 1 that minimises alpha^T P alpha, small ones dropped.

    By non-negative least squares: over x >= 0, x^T P x + c^2 (sum x - 1)^2 is least at a multiple
    of that alpha, whatever c > 0.

    Raises:
        RuntimeError, ValueError: no solution was found.
    """
    from scipy.optimize import nnls  # imported here: a third of a second, of the server alone

    values, vectors = torch.linalg.eigh(P)
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # P = root^T root
    c = P.diagonal().max().sqrt().item() or 1.0
    A = torch.cat([root, torch.full_like(root[:1], c)]).cpu().numpy()
    x = torch.from_numpy(nnls(A, [0.0] * len(P) + [c])[0])
    alpha = x.to(P) / x.sum()
    slope = P @ alpha  # at the minimum, no share can be moved to where it costs less
    if not (slope - alpha @ slope).min() >= -1e-9 * c**2:
        raise RuntimeError("what the solver found is not the minimum")
    alpha[alpha < min(LEAST, alpha.max().item())] = 0  # of thousands all may be small
    return alpha / alpha.sum()

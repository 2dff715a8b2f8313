"""Turns what the ranks report of a round into the row that results keep of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedapa_mpi.clock import SPANS
from fedapa_mpi.comm.messages import Message
from fedapa_mpi.comm.orders import Order
from fedapa_mpi.store.results import RoundRecord, score_arrays


@dataclass
class RankReport:
    """What one rank says of a round: its clients' rows, who it is and where its time went."""

    rows: Message
    identity: Mapping[str, int]
    seconds: Mapping[str, float]


def merged(reports: Mapping[int, RankReport]) -> Message:
    """The rows of all ranks' clients as one report."""
    rows = [report.rows for report in reports.values() if report.rows]  # the server has none
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}


def of_round(
    order: Order,
    reports: Mapping[int, RankReport],
    *,
    M: int,
    ranks: int,
    skipped: Set[int],
    scores: Mapping[str, Tensor],
    also: tuple[str, ...],
    traffic: tuple[np.ndarray, np.ndarray],
    A: np.ndarray | None,
) -> RoundRecord:
    """The record of a finished round.

    Args:
        skipped: clients whose upload was left out.
        scores: recv and post of every client, [M, V, 3] each; V ways, the first is ``predict``.
        also: the names of the other ways.
        traffic: bytes down [M] and up [M].
        A: [M, M] if it is to be recorded.
    """
    answering, rows = order.answering(order.clients), merged(reports)
    loss = np.full(M, np.nan)
    loss[rows["client"].numpy()] = rows["loss"].numpy()
    return RoundRecord(
        round=order.round,
        sampled=_mask(order.clients, M),
        answered=_mask(set(answering) - skipped, M),
        loss=loss,
        **_trained_by(reports, answering, M),
        bytes_down=traffic[0],
        bytes_up=traffic[1],
        seconds=_seconds(reports, ranks),
        recv=scores["recv"][:, 0].numpy(),
        post=scores["post"][:, 0].numpy(),
        also={
            name: {point: scores[point][:, 1 + v].numpy() for point in scores}
            for v, name in enumerate(also)
        },
        A=A,
    )


def final(
    order: Order, report: Message, also: tuple[str, ...], held_out: int
) -> dict[str, np.ndarray]:
    """``final/recv/...`` of all clients and ``final/holdout/{recv,post}/...`` of those outside."""
    row_of = {i: row for row, i in enumerate(report["client"].tolist())}
    members = [row_of[i] for i in order.delivered]
    arrays: dict[str, np.ndarray] = {}
    for v, name in enumerate(("", *also)):
        end = f"/{name}" if name else ""
        arrays |= score_arrays(f"final/recv{end}", report["recv"][members, v].numpy())
        for point in ("recv", "post"):
            scores = np.full((held_out, 3), np.nan)  # not available
            if order.newcomers:
                scores = report[point][[row_of[i] for i in order.newcomers], v].numpy()
            if held_out:
                arrays |= score_arrays(f"final/holdout/{point}{end}", scores)
    return arrays


def _mask(ids: Iterable[int], M: int) -> np.ndarray:
    mask = np.zeros(M, dtype=bool)
    mask[list(ids)] = True
    return mask


def _trained_by(
    reports: Mapping[int, RankReport], answering: Iterable[int], M: int
) -> dict[str, np.ndarray]:
    who = {name: np.full(M, -1, dtype=np.int64) for name in ("rank", "pid", "device")}
    for rank, report in reports.items():
        if not report.rows:
            continue  # the server trains nobody
        mine = report.rows["client"].numpy()
        trained = mine[np.isin(mine, list(answering))]
        who["rank"][trained] = rank
        who["pid"][trained] = report.identity["pid"]
        who["device"][trained] = report.identity["device"]
    return who


def _seconds(reports: Mapping[int, RankReport], ranks: int) -> dict[str, np.ndarray]:
    table = {name: np.full(ranks, np.nan) for name in SPANS}
    for rank, report in reports.items():
        for name, value in report.seconds.items():
            table[name][rank] = value
    return table

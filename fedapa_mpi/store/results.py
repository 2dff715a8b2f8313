"""results.h5: what a run measured, a row for each round; and the fingerprint of a run.

A public interface, R rounds by M clients by C classes:

    /round [R]   /sampled /answered /loss /bytes/{down,up} /trained_by/{rank,pid,device} [R, M]
    /accuracy/{recv,post}/{micro,macro,std,worst10,worst} [R]     over all clients with test data
    /accuracy/{recv,post}/sampled/{micro,macro} [R]               over the sampled of them
    /accuracy/{recv,post}/client /test_loss/{recv,post}/client [R, M]      NaN: not evaluated
    /accuracy/{recv,post}/NAME/...            the same for a strategy's further ways of answering
    /seconds/{compute,wait,transfer,server,evaluation,checkpoint} [R, ranks]
    /A [R', M, M] of the rounds in /A_round [R']                  where the strategy has one
    /final/recv/...  /final/holdout/{recv,post}/...         measured once, after the last round
    /groups [M]                               where it is known who belongs together
    /labels [M, C]   /test_samples [M]   attributes: format, status, fingerprint, config, ...

NaN in /loss: did not train a step. -1 in /trained_by: nobody trained it (device -1: a CPU).
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedapa_mpi.store.folder import SteadyFile, replacing

FORMAT = 1
SECONDS = ("compute", "wait", "transfer", "server", "evaluation", "checkpoint")

Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class RoundRecord:
    """What one round gave; arrays are indexed by client, `seconds` by rank.

    `recv` and `post` hold (correct, samples, loss sum) of each client's test data after receiving
    and after training; a row of NaN, or None for all, means not evaluated.
    """

    round: int
    sampled: np.ndarray  # [M] bool
    answered: np.ndarray  # [M] bool
    loss: np.ndarray  # [M] float64
    rank: np.ndarray  # [M] int64
    pid: np.ndarray  # [M] int64
    device: np.ndarray  # [M] int64
    bytes_down: np.ndarray  # [M] int64
    bytes_up: np.ndarray  # [M] int64
    seconds: Mapping[str, np.ndarray]  # each of SECONDS: [ranks] float64
    recv: np.ndarray | None = None  # [M, 3] float64
    post: np.ndarray | None = None  # [M, 3] float64
    A: np.ndarray | None = None  # [M, M]
    # further ways of answering, by name: {"head": {"recv": [M, 3], "post": [M, 3]}}
    also: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)


def accuracy_metrics(scores: np.ndarray, sampled: np.ndarray) -> dict[str, float]:
    """Summarise `scores` [M, 3] (correct, samples, loss sum) over clients with test samples.

    micro is the accuracy over samples, macro the mean over clients, std their population standard
    deviation, worst10 the mean of the worst tenth (rounded up), worst the least; sampled/micro and
    sampled/macro only look at clients in `sampled` [M] bool. All are NaN over no clients.
    """
    tested = scores[:, 1] > 0  # false for NaN
    among = _summary(scores[tested & sampled])
    return _summary(scores[tested]) | {
        f"sampled/{name}": among[name] for name in ("micro", "macro")
    }


def _summary(scores: np.ndarray) -> dict[str, float]:
    if not len(scores):
        return dict.fromkeys(("micro", "macro", "std", "worst10", "worst"), float("nan"))
    accuracy = np.sort(scores[:, 0] / scores[:, 1])
    return {
        "micro": float(scores[:, 0].sum() / scores[:, 1].sum()),
        "macro": float(accuracy.mean()),
        "std": float(accuracy.std()),
        "worst10": float(accuracy[: -(-len(accuracy) // 10)].mean()),
        "worst": float(accuracy[0]),
    }


class Results:
    """The results of one run: what `path` holds and the rows that wait for the next `flush`."""

    def __init__(self, path: Path, clients: int, round: int) -> None:
        self.path = path
        self._clients = clients
        self._stored = round  # the last round in the file
        self._waiting: list[Rows] = []
        self._attributes: dict[str, Any] = {}
        self._arrays: Rows = {}

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        attributes: Mapping[str, Any],
        labels: np.ndarray,
        test_samples: np.ndarray,
        groups: np.ndarray | None = None,
    ) -> "Results":
        """Write a file without rows, in place of one that may be there, and return its Results.

        `attributes` are str, int, float or, kept as JSON, dict; `labels` [M, C] counts training
        samples by class, `test_samples` [M] the test samples, `groups` [M] says which clients
        belong together, if that is known. Raises OSError.
        """
        results = cls(path, len(labels), 0)
        defaults = {"format": FORMAT, "status": "running", "fingerprint": ""}
        with replacing(path) as file, h5py.File(file, "w") as h5:
            h5.attrs.update(_plain({**defaults, **attributes}))
            h5["labels"] = np.asarray(labels, np.int64)
            h5["test_samples"] = np.asarray(test_samples, np.int64)
            if groups is not None:
                h5["groups"] = np.asarray(groups, np.int64)
            for name, rows in _stack([_row(_no_round(len(labels)))]).items():
                _extend(h5, name, rows[:0])
        return results

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Return the Results of a file to go on with. Raises ValueError if it is none of ours."""
        try:
            with h5py.File(path, "r", locking=False) as h5:
                stored = h5.attrs.get("format")
                if stored == FORMAT:
                    return cls(path, len(h5["labels"]), int(h5["round"].shape[0]))
        except OSError as error:
            raise ValueError(f"results file {path} cannot be read: {error}") from error
        raise ValueError(
            f"results file {path} has format {stored}, this version of fedapa-mpi continues format "
            f"{FORMAT}: use the version that began it"
        )

    def append(self, record: RoundRecord) -> None:
        """Keep the row of the next round in memory. Raises ValueError on a gap or a wrong shape."""
        due = self._stored + len(self._waiting) + 1
        if record.round != due:
            raise ValueError(f"results row of round {record.round}: round {due} is due")
        _check_shapes(record, self._clients)
        self._waiting.append(_row(record))

    def set(self, **attributes: Any) -> None:
        """Change attributes of the file, such as status and fingerprint, at the next flush."""
        self._attributes.update(attributes)

    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write datasets that do not grow, such as those of the last round, at the next flush."""
        self._arrays.update(arrays)

    def flush(self) -> None:
        """Bring rows and attributes to the disk, by a longer copy that takes the file's place.

        Does nothing if nothing is new. Raises OSError (a full disk) with the file as it was and
        the rows still waiting.
        """
        if not (self._waiting or self._attributes or self._arrays):
            return
        with self._changing() as (h5, file):
            h5.attrs.update(_plain(self._attributes))
            for name, rows in _stack(self._waiting).items():
                _extend(h5, name, rows)
                file.check()
            for name, array in self._arrays.items():
                h5.pop(name, None)
                h5[name] = array
        self._stored += len(self._waiting)
        self._waiting, self._attributes, self._arrays = [], {}, {}

    def cut(self, round: int) -> None:
        """Drop all after `round`, and rows not flushed, for a run that goes on from there.

        Raises ValueError if the file ends before `round`.
        """
        if round > self._stored:
            raise ValueError(
                f"results file {self.path} ends at round {self._stored}, but the run would go on "
                f"after round {round}: bring back the results file that belongs to the checkpoint, "
                "or use another --out"
            )
        self._waiting = []
        with h5py.File(self.path, "r", locking=False) as h5:
            if round == self._stored and "final" not in h5:
                return
        with self._changing() as (h5, _):
            h5.pop("final", None)  # measured again at the new end
            rounds = {
                name: h5["A_round" if name[0] == "A" else "round"][:] for name in _growing(h5)
            }
            for name, numbers in rounds.items():
                h5[name].resize(np.count_nonzero(numbers <= round), axis=0)
        self._stored = round

    def rows(self) -> Rows:
        """Return all growing datasets by name, rows in the file and rows that wait."""
        with h5py.File(self.path, "r", locking=False) as h5:
            rows = {name: h5[name][:] for name in _growing(h5)}
        for name, new in _stack(self._waiting).items():
            old = rows.get(name, new[:0])
            width = max(old.shape[1:], new.shape[1:])
            rows[name] = np.concatenate([_widened(old, width), _widened(new, width)])
        return rows

    @contextmanager
    def _changing(self) -> Iterator[tuple[h5py.File, SteadyFile]]:
        """Give a copy of the file to change; it takes the file's place at the end of the block."""
        try:
            with replacing(self.path) as file:
                with self.path.open("rb") as old:
                    shutil.copyfileobj(old, file, 1 << 20)
                file.check()
                with h5py.File(file, "r+") as h5:
                    yield h5, file
        except OSError as error:
            message = f"results file {self.path} cannot be written: {error.strerror or error}; it "
            message += f"still ends with round {self._stored}. Free some space, then use --resume"
            raise OSError(error.errno, message) from error


def _no_round(clients: int) -> RoundRecord:
    none = np.full(clients, -1)
    seconds = dict.fromkeys(SECONDS, np.empty(0))
    return RoundRecord(0, none > 0, none > 0, none / 1, none, none, none, none, none, seconds)


def _check_shapes(record: RoundRecord, clients: int) -> None:
    special = {"recv": (clients, 3), "post": (clients, 3), "A": (clients, clients)}
    for name, value in vars(record).items():
        shape = special.get(name, (clients,))
        if isinstance(value, np.ndarray) and value.shape != shape:
            raise ValueError(f"results row: {name} has shape {value.shape}, expected {shape}")


def _row(record: RoundRecord) -> Rows:
    """Return one round's row of every dataset."""
    row = {
        "round": np.asarray(record.round, np.int64),
        "sampled": np.asarray(record.sampled, np.bool_),
        "answered": np.asarray(record.answered, np.bool_),
        "loss": np.asarray(record.loss, np.float64),
        "trained_by/rank": np.asarray(record.rank, np.int64),
        "trained_by/pid": np.asarray(record.pid, np.int64),
        "trained_by/device": np.asarray(record.device, np.int64),
        "bytes/down": np.asarray(record.bytes_down, np.int64),
        "bytes/up": np.asarray(record.bytes_up, np.int64),
    }
    row |= {f"seconds/{name}": np.asarray(record.seconds[name], np.float64) for name in SECONDS}
    row |= _scores("recv", record.recv, record.sampled) | _scores(
        "post", record.post, record.sampled
    )
    for way, scores in record.also.items():
        for point in ("recv", "post"):
            row |= _scores(f"{point}/{way}", scores[point], record.sampled)
    if record.A is not None:
        row |= {"A": np.asarray(record.A, np.float32), "A_round": row["round"]}
    return row


def _scores(point: str, scores: np.ndarray | None, sampled: np.ndarray) -> Rows:
    if scores is None:
        scores = np.full((len(sampled), 3), np.nan)
    metrics = accuracy_metrics(scores, sampled)
    samples = np.where(scores[:, 1] > 0, scores[:, 1], np.nan)
    return {
        **{f"accuracy/{point}/{name}": np.asarray(metrics[name]) for name in metrics},
        f"accuracy/{point}/client": scores[:, 0] / samples,
        f"test_loss/{point}/client": scores[:, 2] / samples,
    }


def score_arrays(prefix: str, scores: np.ndarray) -> Rows:
    """Return the metrics of ``scores`` [M, 3] and each client's accuracy, as named arrays."""
    metrics = accuracy_metrics(scores, np.zeros(len(scores), np.bool_))
    samples = np.where(scores[:, 1] > 0, scores[:, 1], np.nan)
    named = {name: np.asarray(value) for name, value in metrics.items() if "/" not in name}
    named |= {"client": scores[:, 0] / samples, "test_loss": scores[:, 2] / samples}
    return {f"{prefix}/{name}": value for name, value in named.items()}


def _stack(rows: list[Rows]) -> Rows:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.stack([row[name] for row in rows if name in row]) for name in names}


def _extend(h5: h5py.File, name: str, rows: np.ndarray) -> None:
    """Add rows to a dataset; a first use makes it, wider rows widen it (NaN for older rows)."""
    shape = rows.shape[1:]
    if name not in h5:
        h5.create_dataset(
            name,
            (0, *shape),
            rows.dtype,
            maxshape=(None,) * rows.ndim,
            chunks=(1 if rows.ndim == 3 else 64, *(width or 32 for width in shape)),
            fillvalue=np.nan if rows.dtype.kind == "f" else None,
        )
    dataset, count = h5[name], len(h5[name])
    dataset.resize((count + len(rows), *np.maximum(dataset.shape[1:], shape)))
    dataset[(slice(count, None), *map(slice, shape))] = rows


def _growing(h5: h5py.File) -> list[str]:
    names: list[str] = []

    def visit(name: str, item: h5py.HLObject) -> None:
        if isinstance(item, h5py.Dataset) and item.maxshape[:1] == (None,):
            names.append(name)

    h5.visititems(visit)
    return names


def _widened(rows: np.ndarray, width: tuple[int, ...]) -> np.ndarray:
    if rows.shape[1:] == width:
        return rows
    wide = np.full((len(rows), *width), np.nan)
    wide[:, : rows.shape[1]] = rows
    return wide


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: json.dumps(v) if isinstance(v, dict) else v for k, v in attributes.items()}

"""What rank 0 settles before a run: a new folder or a stored run to go on with."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fedapa_mpi import cli
from fedapa_mpi.config import Experiment, RunConfig
from fedapa_mpi.data import fedfile
from fedapa_mpi.store.folder import RunFolder


@dataclass(frozen=True)
class Start:
    """What is going to run. ``checkpoint`` is None for a new run."""

    experiment: Experiment
    folder: RunFolder
    checkpoint: Path | None
    over: bool = False  # the stored run has finished, and no more rounds are asked for


def settle(request: cli.Request) -> Start:
    """Finds out what a request means; creates and changes nothing.

    Raises:
        ValueError: the request cannot be carried out; the message says why and the way out.
    """
    if request.resume is None:
        asked = cli.resolve(request, look=True)
        folder = RunFolder(asked.run.out or _new_name(asked))
        folder.check_new()
        return Start(asked, folder, None)
    if request.resume == "auto" and request.out is None:
        raise ValueError("--resume auto needs --out DIR: the folder to go on with or to start in")
    if request.resume != "auto" and request.out not in (None, request.resume):
        raise ValueError(
            f"--resume {request.resume} goes on in that folder, so --out {request.out} cannot be "
            f"used: leave --out away, or copy the folder and resume the copy"
        )
    return _continued(request, str(request.out or request.resume))


def versions() -> str:
    """What computed the numbers, as JSON: package versions and Python's."""
    packages = ("fedapa-mpi", "torch", "numpy", "h5py", "mpi4py")
    found = {name: metadata.version(name) for name in packages}
    return json.dumps({"python": platform.python_version(), **found})


def _continued(request: cli.Request, path: str) -> Start:
    from fedapa_mpi.store import checkpoint  # imports torch

    folder = RunFolder(path)
    folder.check_writable()
    newest = checkpoint.latest(folder.checkpoints)
    if newest is None:
        if request.resume == "auto":
            return Start(cli.resolve(request, look=True), folder, None)
        raise ValueError(
            f"--resume {path}: no complete checkpoint in {folder.checkpoints}; start the run "
            f"with --out {path} --resume auto, or name the folder of another run"
        )
    with checkpoint.Checkpoint(newest) as stored:
        config, done = stored.config, stored.round
    asked = cli.resolve(request, config, look=True)
    changes = checkpoint.differences(config, asked.flat(), _may_change(config, asked))
    if asked.run.rounds < config["rounds"]:
        changes.append(f"rounds: stored {config['rounds']}, asked {asked.run.rounds} (only up)")
    if changes:
        raise ValueError(
            f"checkpoint {newest} belongs to a run with another configuration: "
            f"{'; '.join(changes)}. Repeat the stored values (or leave the flags away), or start "
            f"a new run with another --out"
        )
    status = folder.read_status() or {}
    over = done >= asked.run.rounds and status.get("status") == "finished"
    return Start(asked, folder, newest, over)


def _may_change(config: Mapping[str, Any], asked: Experiment) -> frozenset[str]:
    """A federation file may have moved: what it holds is compared later, by its hash."""
    moved = fedfile.is_path(config["dataset"]) and fedfile.is_path(asked.run.dataset)
    return RunConfig.MAY_CHANGE | ({"dataset"} if moved else set())


def _new_name(asked: Experiment) -> str:
    moment = time.strftime("%Y%m%d-%H%M%S")
    base = f"runs/{asked.strategy}-{Path(asked.run.dataset).stem}-{moment}"
    path, k = base, 1
    while Path(path).exists():
        k += 1
        path = f"{base}-{k}"
    return path

"""Starts runs as processes: alone, or under mpirun. Never imports mpi4py.

A pytest process that has initialised MPI cannot start mpirun, so every run is a subprocess.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import h5py

FAULTS = Path(__file__).with_name("faults.py")
OPENMPI = os.environ.get("FEDAPA_OPENMPI")  # an environment with mpi4py and openmpi
# Open MPI refuses to run as root, and more ranks than cores, unless told otherwise
OPENMPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Ended:
    """A launch that has ended."""

    rc: int
    out: str
    err: str
    folder: Path

    @property
    def fingerprint(self) -> str:
        """The last line's sha256."""
        found = re.fullmatch(r"fingerprint: ([0-9a-f]{64})", self.out.strip().splitlines()[-1])
        assert found, f"rc {self.rc}, no fingerprint at the end of:\n{self.out}\n{self.err}"
        return found[1]

    @property
    def status(self) -> dict:
        """status.json."""
        return json.loads((self.folder / "status.json").read_text())

    def results(self) -> h5py.File:
        """results.h5, open for reading."""
        return h5py.File(self.folder / "results.h5", "r")

    def checkpoint(self) -> h5py.File:
        """The newest checkpoint, open for reading."""
        return h5py.File(sorted((self.folder / "checkpoints").glob("round-*.h5"))[-1], "r")


@dataclass
class Launcher:
    """Starts runs in one folder.

    args: flags that every run gets.
    program: run or sweep.
    """

    base: Path
    args: tuple[str, ...] = ()
    program: str = "run"
    count: int = field(default=0)

    def __call__(
        self,
        ranks: int | None = None,
        *args: str,
        fault: str | None = None,
        mpi: str = "mpich",
        folder: Path | None = None,
        resume: bool = False,
        timeout: float = 120,
        env: dict[str, str] | None = None,
    ) -> Ended:
        """Runs to the end. ``ranks`` None: no mpirun; ``resume``: go on in ``folder``."""
        self.count += 1
        folder = folder or self.base / f"run{self.count}"
        common = ["--resume", str(folder)] if resume else ["--out", str(folder), *self.args]
        program = ["-m", f"fedapa_mpi.{self.program}"] if fault is None else [str(FAULTS), fault]
        word = [arg for arg in args[:1] if not arg.startswith("-")]  # the strategy comes first
        command = [*mpirun(ranks, mpi), *program, *word, *common, *args[len(word) :]]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(mpi, {"FAULT_PROGRAM": self.program, **(env or {})}),
            stdin=subprocess.DEVNULL,
        )
        return Ended(done.returncode, done.stdout, done.stderr, folder)


def mpirun(ranks: int | None, mpi: str = "mpich") -> list[str]:
    """How a command line begins: the launcher if there is one, and Python."""
    folder = Path(sys.executable).parent if mpi == "mpich" else Path(OPENMPI or "") / "bin"
    python = str(folder / "python")
    if ranks is None:
        return [python]
    launcher = shutil.which("mpirun", path=str(folder)) or shutil.which("mpirun")
    assert launcher, "no mpirun beside this Python nor on the PATH: pip install '.[mpich]'"
    return [launcher, "-n", str(ranks), python]


def environment(mpi: str = "mpich", more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a launch."""
    package = str(Path(__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    extra = OPENMPI_ENV if mpi == "openmpi" else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra, **(more or {})}

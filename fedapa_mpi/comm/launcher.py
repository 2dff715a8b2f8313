"""What the launcher's environment says before MPI starts: which rank this is, and of how many.

Errors on the command line are said once, by rank 0, and before MPI is up only the environment
tells who that is. Afterwards the communicator alone counts. Order matters: under MPICH's mpirun
in a SLURM job every rank inherits SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1 from the one task
that SLURM started, so PMI's and Open MPI's own variables come first.
"""

import os
from collections.abc import Iterable, Mapping

RANKS = (
    "PMI_RANK",  # MPICH, Intel MPI, srun --mpi=pmi2
    "PMIX_RANK",  # Open MPI 5, srun --mpi=pmix
    "OMPI_COMM_WORLD_RANK",  # Open MPI
    "PALS_RANKID",  # HPE Cray
    "MV2_COMM_WORLD_RANK",  # MVAPICH2
)
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
OTHERS = ("PMI_SIZE", "MPI_LOCALRANKID")  # tell that there is a launcher, not which rank


def declared_rank(env: Mapping[str, str] = os.environ) -> int:
    """The rank that the launcher gave this process; 0 without a launcher.

    Raises ValueError when the variable that decides is not a number.
    """
    rank = _first(RANKS, env)
    if rank is None and _srun_tasks(env) > 1:
        rank = _first(("SLURM_PROCID",), env)
    return rank or 0


def declared_size(env: Mapping[str, str] = os.environ) -> int:
    """The number of processes that the launcher says it started; 1 when nothing says so.

    Raises ValueError when the variable that decides is not a number.
    """
    return _first(SIZES, env) or 1


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether some launcher started this process; otherwise one process runs without MPI."""
    return any(name in env for name in RANKS + OTHERS) or _srun_tasks(env) > 1


def check_world(size: int, env: Mapping[str, str] = os.environ) -> None:
    """Refuse to run N times side by side when N processes were meant to work together.

    size: of MPI's world. Raises ValueError when it is 1 and the launcher started more.
    """
    declared = declared_size(env)
    if size == 1 and declared > 1:
        raise ValueError(
            f"started as {declared} separate worlds of size 1: the launcher and mpi4py's MPI "
            "library do not belong together. Use the mpirun of the MPI that mpi4py uses; under "
            "srun use --mpi=pmi2 for MPICH or --mpi=pmix for Open MPI, never --mpi=none"
        )


def _srun_tasks(env: Mapping[str, str]) -> int:
    """How many tasks srun started here; 1 outside SLURM and in the step of an mpirun."""
    return _first(("SLURM_STEP_NUM_TASKS",), env) or 1


def _first(names: Iterable[str], env: Mapping[str, str]) -> int | None:
    """The value of the first of these variables that is set, None when none is."""
    for name in names:
        if name in env:
            if not env[name].isdecimal():
                raise ValueError(
                    f"environment variable {name} is {env[name]!r}, expected a number >= 0: "
                    "unset it, or start through the launcher that sets it"
                )
            return int(env[name])
    return None

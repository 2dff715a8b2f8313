"""launcher.py: environments as launchers really set them (measured) and what is read from them."""

import os
import subprocess
import sys

import pytest

from fedapa_mpi.comm.launcher import check_world, declared_rank, declared_size, launched

# One task that SLURM started, and in it an mpirun with 21 ranks.
STEP = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "21", "MPI_LOCALRANKID": "5"}
OPENMPI = {"PMIX_RANK": "5", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "21"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "21"}


@pytest.mark.parametrize(
    ("env", "rank", "size", "is_launched"),
    [
        ({}, 0, 1, False),
        (STEP, 0, 1, False),
        ({"SLURM_PROCID": "3"}, 0, 1, False),  # a batch shell: no step, no ranks
        ({"SLURM_NTASKS": "21", "SLURM_PROCID": "0"}, 0, 1, False),
        (MPICH, 5, 21, True),
        (STEP | MPICH, 5, 21, True),
        (OPENMPI, 5, 21, True),
        (STEP | OPENMPI, 5, 21, True),
        # mpirun over six nodes: SLURM's step holds one daemon per node
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6"} | MPICH, 5, 21, True),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6"} | OPENMPI, 5, 21, True),
        (SRUN, 5, 21, True),  # --mpi=none
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "21"}, 5, 21, True),
        (SRUN | {"PMIX_RANK": "5"}, 5, 21, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, 0, 1, True),  # mpirun -n 1
        ({"PALS_RANKID": "4"}, 4, 1, True),
        ({"MV2_COMM_WORLD_RANK": "4", "MV2_COMM_WORLD_SIZE": "8"}, 4, 8, True),
        ({"PMI_SIZE": "2"}, 0, 2, True),
        ({"MPI_LOCALRANKID": "0"}, 0, 1, True),
    ],
)
def test_what_launchers_say(env, rank, size, is_launched):
    assert declared_rank(env) == rank
    assert declared_size(env) == size
    assert launched(env) is is_launched


@pytest.mark.parametrize("env", [MPICH, OPENMPI, SRUN, STEP | MPICH])
def test_separate_worlds_are_refused_with_the_cure(env):
    with pytest.raises(ValueError, match="21 separate worlds of size 1") as error:
        check_world(1, env)
    for cure in ("mpirun", "--mpi=pmi2", "--mpi=pmix", "never --mpi=none"):
        assert cure in str(error.value)


@pytest.mark.parametrize(
    ("size", "env"), [(21, MPICH), (21, SRUN), (1, {}), (1, STEP), (1, {"PMI_SIZE": "1"})]
)
def test_a_world_that_fits_is_accepted(size, env):
    check_world(size, env)


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_named(value):
    with pytest.raises(ValueError, match=f"PMI_RANK is '{value}'"):
        declared_rank({"PMI_RANK": value})
    with pytest.raises(ValueError, match=f"SLURM_STEP_NUM_TASKS is '{value}'"):
        declared_size({"SLURM_STEP_NUM_TASKS": value})


def test_the_real_environment_is_the_default_and_read_late(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MV2_", "PALS_")):
            monkeypatch.delenv(name)
    assert not launched()
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert (declared_rank(), declared_size(), launched()) == (3, 4, True)


def test_nothing_heavy_is_imported_before_mpi_starts():
    code = (
        "import sys; import fedapa_mpi.comm.launcher, fedapa_mpi.comm.placement, "
        "fedapa_mpi.stopping; print(sorted({'torch', 'numpy', 'mpi4py'} & sys.modules.keys()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "[]\n"

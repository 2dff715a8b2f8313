"""Messages above 2 GiB: more than 2^31 - 1 bytes in one send, which MPI libraries count in ints."""

import os
import subprocess
from pathlib import Path

import pytest
from launching import OPENMPI, environment, mpirun

PROGRAM = Path(__file__).with_name("big_message.py")
NEEDED = 10 * 2**30


def available():
    """Bytes of memory that are free for a new process, as far as can be told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_tensor_above_two_gibibytes_there_and_back(mpi):
    if mpi == "openmpi" and not OPENMPI:
        pytest.skip("FEDAPA_OPENMPI does not name an environment with Open MPI")
    if available() < NEEDED:
        pytest.skip(f"{available() >> 30} GiB of memory are free, {NEEDED >> 30} are needed")
    command = [*mpirun(2, mpi), str(PROGRAM)]
    done = subprocess.run(
        command, env=environment(mpi), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2362232012 bytes: there" in done.stdout, done.stdout
    print(mpi, done.stdout)

# shellcheck shell=bash
# What differs from site to site, and nothing else. The job scripts source this file first; a value
# that is in the environment already wins over the one given here.

# 1. Modules: the Python and the MPI that the environment below was made with.
# module load python openmpi

# 2. The environment with fedapa-mpi; without one, `python` is what the PATH says.
VENV=${VENV:-$FEDAPA_ROOT/.venv}
# shellcheck source=/dev/null
if [ -f "$VENV/bin/activate" ]; then . "$VENV/bin/activate"; fi
PYTHON=${PYTHON:-python}

# 3. What starts the ranks; `-n RANKS` is added, and -K1 to srun (or a dead rank would hang the job).
#      mpirun               the one that belongs to the MPI of mpi4py
#      srun --mpi=pmi2      MPICH, Intel MPI
#      srun --mpi=pmix      Open MPI
#    `srun --mpi=none` gives separate runs of one process each: fedapa-mpi refuses those.
LAUNCHER=${LAUNCHER:-mpirun}

# 4. Threads: fedapa-mpi itself keeps each rank to one, or to --threads N; then submit with
#    --cpus-per-task=N, which srun has to be told once more.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}

# 5. Binding: none. mpirun starts one task per node, and where SLURM or mpirun binds that task to its
#    one CPU, all ranks of the node share this CPU.
export SLURM_CPU_BIND=${SLURM_CPU_BIND:-none}
export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none} # Open MPI 5
export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}       # Open MPI 4
if [ -z "${SLURM_JOB_ID:-}" ]; then # a laptop: more ranks than cores are fine
  export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
  export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}
fi

# 6. Data sets, fetched beforehand where there is a network: compute nodes often have none.
# export FEDAPA_DATA=$HOME/fedapa-data

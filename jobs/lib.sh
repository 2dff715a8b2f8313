# shellcheck shell=bash
# What the job scripts share: start a run, pass signals on to it, requeue the job while the run is
# unfinished. Sourced, not run.
#
# USR1 (time is nearly up) and TERM (scancel, scontrol requeue, preemption) both become USR1 to the
# launcher, which hands it to every rank: the round is finished, a checkpoint is written, all end
# with status 0. TERM is never passed on: Open MPI's mpirun would kill the ranks. Before the run has
# written its status file the ranks may not listen yet and there is nothing to save: then the
# launcher is killed instead.
#
# Environment: MAX_RESTARTS (50), RANKS, and what env.sh names.

job=${SLURM_JOB_ID:-}
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
restarts=${SLURM_RESTART_COUNT:-0}
MAX_RESTARTS=${MAX_RESTARTS:-50}

out=''     # folder of the run
before=''  # who wrote its status file before this start
pid=''     # of the launcher, while it runs
signals='' # that have come
caught=''  # whether one came during the last wait
killed=''  # whether the launcher had to be killed

arguments=()       # of a job script that runs cells
folder='' flags=() # of one cell, see run_cells

say() { printf '[job] %(%F %T)T %s\n' -1 "$*"; }

die() {
  printf '[job] error: %s\n' "$*" >&2
  exit 2
}

# A field of the status file, which has one line per field; nothing if there is none.
field() { sed -n 's/^ *"'"$1"'": "\{0,1\}\([^",]*\)"\{0,1\},\{0,1\}$/\1/p' "$out/status.json" 2>/dev/null; }

# Whether the status file was written by the start that this script made: not by an earlier one, and
# not by another job that uses the folder.
this_start() {
  local started
  started=$(field started)
  [ -n "$started" ] && [ "$started" != "$before" ] || return
  [ -z "$job" ] || { [ "$(field job_id)" = "$job" ] && [ "$(field restart_count)" = "$restarts" ]; }
}

came() { [[ " $signals " == *" $1 "* ]]; }

# A process and all below it.
tree() {
  local child
  echo "$1"
  for child in $(pgrep -P "$1"); do tree "$child"; done
}

on_signal() {
  signals="$signals $1"
  caught=1
  if [ -z "$pid" ]; then
    say "$1 outside the run"
  elif this_start && ! { [ "$1" = INT ] && [ "$signals" != ' INT' ]; }; then
    say "$1: USR1 to the launcher, pid $pid"
    kill -USR1 "$pid" 2>/dev/null
  else
    kill_launcher "$1"
  fi
}

kill_launcher() {
  if this_start; then say "$1 again: ending at once"; else say "$1 before the run has begun: ending it"; fi
  killed=1
  # shellcheck disable=SC2046 # one word per process
  kill -KILL $(tree "$pid") 2>/dev/null
}

trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
trap 'on_signal INT' INT
trap 'on_signal HUP' HUP

# The value of --out among these words, if it is there.
out_in() {
  while [ $# -gt 0 ]; do
    case $1 in
    --out) echo "${2:-}" ;;
    --out=*) echo "${1#*=}" ;;
    esac
    shift
  done
}

# run_job OUT [STRATEGY] [--FLAG VALUE ...]: starts the run or goes on with it, waits for its end and
# requeues the job if it has to. Returns the launcher's status.
run_job() {
  local launch rc
  out=$1
  shift
  read -ra launch <<<"$LAUNCHER"
  if [ "${launch[0]##*/}" = srun ]; then launch+=(-K1); fi
  RANKS=${RANKS:-${SLURM_NTASKS:-21}}
  launch+=(-n "$RANKS" "$PYTHON" -m fedapa_mpi.run "$@" --out "$out" --resume auto)
  if [ -n "${LIST:-}" ]; then
    echo "${launch[*]}"
    return
  fi
  before=$(field started)
  killed=''
  say "job ${job:-none} on ${SLURM_JOB_NODELIST:-$HOSTNAME}, restart $restarts, GPUs ${CUDA_VISIBLE_DEVICES:-as found}"
  say "${launch[*]}"
  if [ -n "$signals" ]; then # it came while env.sh was at work
    killed=1 rc=0
  else
    set -m # a process group of its own: Ctrl-C is for this script, which says USR1
    "${launch[@]}" </dev/null &
    pid=$!
    set +m
    if [ -n "$signals" ]; then kill_launcher "${signals##* }"; fi
    while :; do
      caught=''
      wait "$pid"
      rc=$?
      [ -n "$caught" ] || break # a signal cuts the wait short
    done
    pid=''
  fi
  conclude "$rc"
}

# Says how this start ended and puts the job back into the queue if it has work left.
conclude() {
  local rc=$1 status=none reason=''
  if this_start; then
    status=$(field status) reason=$(field reason)
    say "launcher ended with $rc; $out is $status, round $(field round) of $(field rounds)"
  else
    say "launcher ended with $rc; this start has written no status"
  fi
  if came TERM || [ "$reason" = SIGTERM ]; then
    say "SIGTERM came: not requeued from here; sbatch the same line again to go on"
  elif [ "$status" != interrupted ] && [ -z "$killed" ]; then
    : # finished, failed or refused: the launcher's status says it
  elif [ -z "$job" ]; then
    say "to go on: the same line again"
  elif [ "$restarts" -ge "$MAX_RESTARTS" ]; then
    say "error: restarted $restarts times and still not finished, and MAX_RESTARTS is $MAX_RESTARTS: not" \
      "requeued. If $out/status.json shows progress, sbatch the same line again; if not, a round may take" \
      "longer than the time limit"
    return 1
  elif scontrol requeue "$job"; then
    say "requeued: job $job goes on when it starts again"
  else
    say "error: scontrol cannot requeue job $job: sbatch the same line again to go on"
    return 1
  fi
  return "$rc"
}

# pick K 'a b' 'x y z': one word of each list into `cell`; the last list runs fastest. False if K is
# too large.
pick() {
  local k=$1 words i
  shift
  cell=()
  for ((i = $#; i > 0; i--)); do
    read -ra words <<<"${!i}"
    cell=("${words[k % ${#words[@]}]}" "${cell[@]}")
    ((k /= ${#words[@]}))
  done
  [ "$k" = 0 ]
}

# run_cells FUNCTION LIST ...: the cell of this array task; without an array all, one by one.
# FUNCTION gets the words of the cell and fills `folder` (below runs/JOBNAME) and `flags`. With LIST=1
# only says what would run.
run_cells() {
  local describe=$1 total=1 words list k tasks status=0
  shift
  for list in "$@"; do
    read -ra words <<<"$list"
    ((total *= ${#words[@]}))
  done
  [ "$total" -gt 0 ] || die "one of the lists is empty: $*"
  tasks=("${SLURM_ARRAY_TASK_ID:-}")
  [ -n "${tasks[0]}" ] || mapfile -t tasks < <(seq 0 $((total - 1)))
  for k in "${tasks[@]}"; do
    [ -z "$signals" ] || break
    pick "$k" "$@" || die "there is no cell $k: submit with --array=0-$((total - 1)) or less"
    say "cell $k of 0-$((total - 1)): ${cell[*]}"
    "$describe" "${cell[@]}"
    run_job "$RUNS/$folder" "${flags[@]}" "${arguments[@]}" || status=$?
  done
  return "$status"
}

# shellcheck source=jobs/env.sh
. "$FEDAPA_ROOT/jobs/env.sh"
export PYTHONUNBUFFERED=1 # a log that is up to date, also when the job is killed
RUNS=${RUNS:-runs/${SLURM_JOB_NAME:-$name}}

"""A throw-away SLURM below one folder of this machine: ``python tests/slurm.py COMMAND``.

munged, slurmctld and one slurmd per node, as Debian's packages slurm-wlm and munge bring them; no
systemd, no accounting. Nodes, CPUs and GPUs are invented, so that jobs of any shape start; a GPU is
a link to /dev/null. Started as a program it runs COMMAND in a cluster of two nodes and stops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")
FREEZER = Path("/sys/fs/cgroup/freezer")
PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"  # where SLURM's PMIx plugin looks for its library
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
SEARCH = os.environ["PATH"] + ":/usr/sbin:/sbin"

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PriorityType=priority/basic
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
ReturnToService=2
KillWait=20
MinJobAge=3600
FirstJobId={first}
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
TmpFS={folder}/spool/%n
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""
CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=SEARCH)]
    if absent:
        return f"no {', '.join(absent)}: install Debian's packages slurm-wlm and munge"
    return None if os.geteuid() == 0 else "SLURM's daemons have to be started by root"


def has_pmix() -> bool:
    """Whether ``srun --mpi=pmix`` can work."""
    return bool(glob.glob(PMIX))


class Cluster:
    """Started and stopped by ``with``. CPUs and GPUs are per node.

    The first node has the name of this machine, or Open MPI would not start under PMIx. Since
    control groups are called after node and job, every cluster numbers its jobs differently.
    """

    def __init__(self, nodes: int = 1, cpus: int = 32, gpus: int = 4) -> None:
        host = socket.gethostname().partition(".")[0]
        self.nodes = [host, *(f"{host}-n{k}" for k in range(2, nodes + 1))]
        self.cpus, self.gpus = cpus, gpus
        self.proctrack = "cgroup" if os.access(FREEZER / "cgroup.procs", os.W_OK) else "linuxproc"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        self._began = time.time()
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        try:
            self._configure()
            self._start(
                "munged", "--foreground", *self._munge("key", "socket", "pid", "log", "seed")
            )
            self.until(lambda: self._quiet("munge", *self._munge("socket"), "-n"), "munged")
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            self.until(self._idle, "all nodes idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            self._quiet("scancel", f"--user={getpass.getuser()}")
            deadline = time.monotonic() + 30
            while self._said("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._sweep()

    # -- use -------------------------------------------------------------------------------------

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What SLURM's commands need to find this cluster."""
        # in place of this process's own: what a test has taken out must not come back
        return {**(more or os.environ), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        """Runs one of SLURM's commands; its output. Raises CalledProcessError."""
        done = subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    def submit(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """``sbatch``; the number of the job."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=cwd,
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` tells."""
        line = self.command("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(word.partition("=")[::2] for word in line.split() if "=" in word)

    def wait(self, job: str, timeout: float = 180) -> dict[str, str]:
        """Waits until a job has ended for good, whatever its restarts; what is known of it then."""
        self.until(lambda: self.job(job)["JobState"] in ENDED, f"end of job {job}", timeout)
        return self.job(job)

    # -- how -------------------------------------------------------------------------------------

    def _configure(self) -> None:
        for part in ("state", "log", "run", "dev", "munge", *(f"spool/{n}" for n in self.nodes)):
            (self.folder / part).mkdir(parents=True)
        for k in range(self.gpus):
            (self.folder / f"dev/gpu{k}").symlink_to("/dev/null")
        (self.folder / "munge/key").write_bytes(os.urandom(128))
        (self.folder / "munge/key").chmod(0o400)
        ports = free_ports(1 + len(self.nodes))
        host = self.nodes[0]
        conf = CONFIG.format(
            host=host,
            port=ports[0],
            first=os.getpid() % 60000 * 1000 + 1,
            user=getpass.getuser(),
            folder=self.folder,
            proctrack=self.proctrack,
        )
        gres = ""
        for node, port in zip(self.nodes, ports[1:]):
            conf += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={self.cpus} RealMemory=1000000 Gres=gpu:{self.gpus} State=UNKNOWN\n"
            )
            gres += f"NodeName={node} Name=gpu File={self.folder}/dev/gpu[0-{self.gpus - 1}]\n"
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(gres)
        if self.proctrack == "cgroup":
            (self.folder / "cgroup.conf").write_text(CGROUP)

    def _munge(self, *parts: str) -> list[str]:
        options = {"key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        return [f"--{options.get(part, part)}={self.folder}/munge/{part}" for part in parts]

    def _start(self, *words: str) -> None:
        program = shutil.which(words[0], path=SEARCH)
        assert program
        with open(self.folder / "log/output", "ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, *words[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment(),
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            )

    def _idle(self) -> bool:
        return set(self._said("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}

    def _quiet(self, *words: str) -> bool:
        done = subprocess.run(words, env=self.environment(), capture_output=True, timeout=60)
        return done.returncode == 0

    def _said(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(tail(log) for log in sorted((self.folder / "log").iterdir()))
                raise TimeoutError(f"{what}: not after {timeout:.0f} s\n{logs}")
            time.sleep(0.1)

    def _sweep(self) -> None:
        """Removes the folder and what killed jobs leave outside it."""
        for node in self.nodes:
            for groups in ("/uid_*/job_*/step_*", "/uid_*/job_*", "/uid_*", ""):
                for group in FREEZER.glob(f"slurm_{node}{groups}"):
                    remove_group(group)
        left = glob.glob("/dev/shm/mpich_shm_*") + glob.glob("/dev/shm/sm_segment*")
        left += glob.glob("/tmp/hydra_hwloc_xmlfile_*")
        for path in map(Path, left):
            if path.stat().st_mtime >= self._began and not in_use(path):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def in_use(path: Path) -> bool:
    """Whether a process has this file in its memory or open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.path.realpath(fd) == str(path) for fd in (process / "fd").iterdir()):
                return True
        except OSError:  # it has ended
            continue
    return False


def end_with_parent() -> None:
    """In a child: asks Linux for SIGTERM when the parent dies, be it by SIGKILL."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove_group(group: Path) -> None:
    """Removes an empty control group."""
    with contextlib.suppress(OSError):
        group.rmdir()


def tail(log: Path) -> str:
    """The end of a log."""
    return f"-- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def main() -> int:
    """Runs a command in a cluster."""
    reason = missing()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Cluster(nodes=2) as cluster:
        return subprocess.run(sys.argv[1:] or ["sinfo"], env=cluster.environment()).returncode


if __name__ == "__main__":
    sys.exit(main())

"""A real Slurm on this machine for the tests: munged, slurmctld and two slurmd on loopback, in a folder of their own.

    with slurm_cluster(folder) as cluster:
        job = cluster.sbatch(["--nodes=2", "scripts/slurm/pretrain_gpt.sbatch", "RECIPE"])
        cluster.wait_for(job, lambda: "iteration" in log.read_text(), "the first step")
        cluster.run("scontrol", "show", "job", job)

Debian's packages slurm-wlm and munge are installed by apt-get where they are missing and the tests run as root; else
`why_no_slurm()` says why there is none, and tests skip with that.

What always holds: ports, sockets, keys and state are the cluster's own; everything that was started is stopped at the
end, jobs first; a wait that fails shows the job and the ends of the logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
_DAEMONS = ("munged", "slurmctld", "slurmd")
_PACKAGES = ("slurm-wlm", "munge")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job begins cred_expire (5 s at least) later at the earliest.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=craft
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
KillWait=10
# A message that timed out on a busy machine is sent again: a late order to end a step would meet the requeued one.
MessageTimeout=60
TCPTimeout=30
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 Gres=craft:4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _missing() -> list[str]:
    return [name for name in _DAEMONS if shutil.which(name, path=_PATH) is None]


def why_no_slurm() -> str | None:
    """Install Slurm where that is possible; None when it is there, else the reason why not."""
    if _missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "--no-install-recommends", *_PACKAGES]
        done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            subprocess.run(["apt-get", "update"], env=environment, capture_output=True, check=False)
            done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"apt-get could not install {' and '.join(_PACKAGES)}: {done.stderr.strip()[-300:]}"
    if _missing():
        return f"{', '.join(_missing())} not found, and only root can install {' and '.join(_PACKAGES)} with apt-get"
    if os.geteuid() != 0:
        return "slurmd starts jobs only as root"
    return None


def _free_ports(count: int) -> list[int]:
    """The first of `count` neighbouring ports that are free."""
    for first in range(26000, 32000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(contextlib.closing(socket.socket())).bind(("127.0.0.1", port))
            except OSError:
                continue
        return list(range(first, first + count))
    raise RuntimeError(f"no {count} neighbouring free ports from 26000 to 32000")


class Cluster:
    """The running daemons and what is done with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "PYTEST", "PYTHON", "MASTER_"))
        }
        self.environment |= {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable}

    def run(self, *command: str) -> str:
        """Run a Slurm command; returns what it prints."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def sbatch(self, arguments: Sequence[str], **variables: str) -> str:
        """Submit a job with these variables on top; returns its id."""
        command = ["sbatch", "--parsable", f"--output={self.folder}/job-%j.out", "--time=20", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment | variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job: {"JobState": "RUNNING", ...}."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        """What the job printed so far, all its starts."""
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def wait_for(self, job: str, condition: Callable[[], bool], what: str, seconds: float = 400) -> None:
        """Wait until the condition holds; fails at once when the job ends before, and at the latest in `seconds`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        deadline = time.monotonic() + seconds
        while not condition():
            state = self.job(job)["JobState"]
            if state in ended and condition():
                return
            assert state not in ended, f"the job is {state} before {what}:\n{self.output(job)[-6000:]}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}:\n{self._report(job)}"
            time.sleep(0.2)

    def _report(self, job: str) -> str:
        logs = "\n".join(f"-- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))
        return f"{self.run('scontrol', 'show', 'job', job)}\n{self.output(job)[-4000:]}\n{logs}"


def _start(cluster: Cluster) -> None:
    folder = cluster.folder
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    text = _CONFIGURATION.format(folder=folder, ports=_free_ports(3), user="root", host=socket.gethostname())
    (folder / "slurm.conf").write_text(text)
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    cluster.run("munged", *options, f"--seed-file={folder}/munge.seed", "--force", "--num-threads=2")
    cluster.run("slurmctld")
    for node in ("node1", "node2"):
        cluster.run("slurmd", "-N", node)
    deadline = time.monotonic() + 60
    while cluster.run("sinfo", "--noheader", "--format=%T").split() != ["idle"]:
        assert time.monotonic() < deadline, f"the nodes are not idle: {cluster.run('sinfo', '--Node', '--long')}"
        time.sleep(0.2)


def _stop(cluster: Cluster) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "--signal=KILL", "--full", "--user=root")
        cluster.run("scancel", "--user=root")
        deadline = time.monotonic() + 15
        while cluster.run("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.3)
    for file in sorted(cluster.folder.glob("*.pid"), reverse=True):  # slurmd and slurmctld before munged
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired, ValueError):
            daemon = psutil.Process(int(file.read_text()))
            daemon.terminate()
            daemon.wait(10)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Two nodes of four CPUs each, on this machine, until the block is left."""
    cluster = Cluster(folder)
    try:
        _start(cluster)
        yield cluster
    finally:
        _stop(cluster)

"""Real Slurm and real Open MPI on one machine, for the tests that start runs by them."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_pod import processes_with

from largebatch.pod import free_port

# A job that is queued again waits until the credentials of its last start have expired.
SLURM_CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""
SETTINGS = {
    "dataset.num_examples": 400,
    "dataset.image_size": 8,
    "model.name": "resnet8",
    "batch.size": 64,
    "train.inner_steps": 4,
    "train.outer_steps": 30,
    "checkpoint.every_sec": 0,
    "log.tensorboard": False,
}
LIMIT_SEC = 300  # two busy cores took 133 s to start two hosts
ENVIRONMENT = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


@contextlib.contextmanager
def slurm_cluster(folder):
    """A Slurm cluster of this machine, whose commands work in this process and in those that it starts."""
    daemons = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "slurmd")]
    if None in daemons or shutil.which("srun") is None:
        pytest.skip("Slurm is not installed")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    path.write_text(
        SLURM_CONF.format(
            host=socket.gethostname().split(".")[0],
            controller_port=free_port(),
            node_port=free_port(),
            user=getpass.getuser(),
            folder=folder,
            cpus=os.cpu_count(),
        )
    )
    environment = os.environ | {"SLURM_CONF": str(path)}
    with (folder / "slurm.log").open("w") as log:
        processes = [
            subprocess.Popen([daemon, "-D"], env=environment, stdout=log, stderr=log) for daemon in daemons
        ]
    os.environ["SLURM_CONF"] = str(path)
    try:
        wait_until(lambda: subprocess.run(["srun", "true"], capture_output=True, timeout=30).returncode == 0)
        yield
    finally:
        del os.environ["SLURM_CONF"]
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


def mpirun_on(hosts: int) -> list[str]:
    """The command that starts a program on so many hosts by Open MPI."""
    if shutil.which("mpirun") is None or "Open MPI" not in subprocess.getoutput("mpirun --version"):
        pytest.skip("Open MPI is not installed")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(hosts)]


def fields_of(cache_dir, **others) -> list[str]:
    """The flags of a run of some seconds."""
    fields = SETTINGS | {"augment.cache_dir": cache_dir} | others
    return [f"--config.{name}={value}" for name, value in fields.items()]


def train_command(workdir, cache_dir, **others) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}", *fields_of(cache_dir, **others)]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def rows_of(workdir) -> int:
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def hosts_of(workdir) -> list[int]:
    """The processes of train.py, without those that started them."""
    found = processes_with(f"--workdir={workdir}")
    return [pid for pid, command in found.items() if command.startswith(sys.executable)]


def starts_of(workdir) -> list[dict]:
    """What events.jsonl says of the starts of a run."""
    events = [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "start"]

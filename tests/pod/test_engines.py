"""Runs that Slurm and Open MPI start, lose a host of, and start again on fewer; real ones, on one machine."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from test_pod import processes_with

from largebatch.pod.processes import free_port

SLURM_CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
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
LIMIT_SEC = 120


@pytest.fixture
def srun(tmp_path):
    """srun(hosts) is the command that starts a program on so many hosts of a Slurm cluster of this machine."""
    daemons = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "slurmd")]
    if None in daemons or shutil.which("srun") is None:
        pytest.skip("Slurm is not installed")
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    path = tmp_path / "slurm.conf"
    path.write_text(
        SLURM_CONF.format(
            host=socket.gethostname().split(".")[0],
            controller_port=free_port(),
            node_port=free_port(),
            user=getpass.getuser(),
            folder=tmp_path,
            cpus=os.cpu_count(),
        )
    )
    environment = os.environ | {"SLURM_CONF": str(path)}
    with (tmp_path / "slurm.log").open("w") as log:
        processes = [
            subprocess.Popen([daemon, "-D"], env=environment, stdout=log, stderr=log) for daemon in daemons
        ]
    os.environ["SLURM_CONF"] = str(path)
    try:
        wait_until(lambda: subprocess.run(["srun", "true"], capture_output=True, timeout=30).returncode == 0)
        yield lambda hosts: ["srun", "--overcommit", "--kill-on-bad-exit", f"--ntasks={hosts}"]
    finally:
        del os.environ["SLURM_CONF"]
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


@pytest.fixture
def mpirun():
    """mpirun(hosts) is the command that starts a program on so many hosts by Open MPI."""
    if shutil.which("mpirun") is None or "Open MPI" not in subprocess.getoutput("mpirun --version"):
        pytest.skip("Open MPI is not installed")
    return lambda hosts: ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(hosts)]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + LIMIT_SEC
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def check_that_fewer_hosts_go_on(start, tmp_path, cache_dir) -> None:
    """A run on 4 hosts loses one; on 2 it goes on to its end."""
    fields = SETTINGS | {"augment.cache_dir": cache_dir}
    workdir = tmp_path / "run"
    train = [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}"]
    train += [f"--config.{name}={value}" for name, value in fields.items()]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen([*start(4), *train], cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: first.poll() is not None or rows_of(workdir) >= 2)
        hosts = hosts_of(workdir)
        assert len(hosts) == 4, (tmp_path / "first.log").read_text()
        os.kill(hosts[-1], signal.SIGKILL)
        assert first.wait(LIMIT_SEC) != 0  # the engine ends the others
    finally:
        first.kill()
        first.wait()
    wait_until(lambda: not hosts_of(workdir))
    assert rows_of(workdir) < SETTINGS["train.outer_steps"]
    second = subprocess.run(
        [*start(2), *train], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SEC
    )
    assert second.returncode == 0, second.stdout + second.stderr
    events = [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]
    starts = [event for event in events if event["event"] == "start"]
    assert [(event["hosts"], event["devices"]) for event in starts] == [(4, 4), (2, 2)]
    assert starts[1]["step"] > 0
    assert rows_of(workdir) == SETTINGS["train.outer_steps"]


def rows_of(workdir) -> int:
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def hosts_of(workdir) -> list[int]:
    """The processes of train.py, without those that started them."""
    found = processes_with(f"--workdir={workdir}")
    return [pid for pid, command in found.items() if command.startswith(sys.executable)]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_slurm(srun, tmp_path, session_cache):
    check_that_fewer_hosts_go_on(srun, tmp_path, session_cache)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_open_mpi(mpirun, tmp_path, session_cache):
    check_that_fewer_hosts_go_on(mpirun, tmp_path, session_cache)

"""Runs that Slurm and Open MPI stop and start again; on one machine."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, small_flags
from test_pod import processes_with
from test_resume import events_of

from largebatch.pod import free_port

SBATCH_FILE = ROOT / "launch" / "slurm.sbatch"
# The file as it is, on a cluster of one machine.
ON_ONE_MACHINE = ["--ntasks-per-node=2", "--overcommit"]
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
SETTINGS = {  # of three steps an outer loop
    "train.outer_steps": 20,
    "checkpoint.every_sec": 0,
    "log.tensorboard": False,
}
ENDED = ("FAILED", "COMPLETED", "CANCELLED")
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
    """Return the command that starts a program on so many hosts by Open MPI."""
    if shutil.which("mpirun") is None or "Open MPI" not in subprocess.getoutput("mpirun --version"):
        pytest.skip("Open MPI is not installed")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(hosts)]


def train_command(workdir, cache_dir) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}", *small_flags(cache_dir, **SETTINGS)]


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
    return [event for event in events_of(workdir) if event["event"] == "start"]


def submit(folder, cache_dir, *options: str) -> str:
    """Submits the file for a run of two processes in `folder`; returns the number of the job."""
    environment = os.environ | ENVIRONMENT | {"PYTHON": sys.executable, "WORKDIR": str(folder / "run")}
    command = ["sbatch", "--parsable", *ON_ONE_MACHINE, f"--output={folder / 'job.log'}", *options]
    command += [str(SBATCH_FILE), *small_flags(cache_dir, **SETTINGS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state_of(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return shown.split("JobState=")[1].split()[0]


def log_of(folder) -> str:
    path = folder / "job.log"
    return path.read_text() if path.exists() else "no log"


def wait_for_rows(folder, job: str, count: int) -> None:
    wait_until(lambda: rows_of(folder / "run") >= count or state_of(job) in ENDED)
    assert SETTINGS["train.outer_steps"] > rows_of(folder / "run") >= count, log_of(folder)


def check_starts(workdir, hosts: list[int]) -> None:
    """It was started on so many hosts of one device, and went on where it had been."""
    starts = starts_of(workdir)
    assert [(start["hosts"], start["devices"]) for start in starts] == [(count, count) for count in hosts]
    assert 0 < starts[1]["step"] < SETTINGS["train.outer_steps"] * 3
    assert rows_of(workdir) == SETTINGS["train.outer_steps"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_slurm_job_is_queued_again_when_told_to_stop_and_not_when_cancelled(tmp_path, session_cache):
    """And the run resumes on fewer hosts."""
    workdir = tmp_path / "run"
    with slurm_cluster(tmp_path):
        job = submit(tmp_path, session_cache)
        wait_for_rows(tmp_path, job, 2)
        subprocess.run(["scancel", "--signal=TERM", job], check=True, timeout=30)
        wait_until(lambda: len(starts_of(workdir)) == 2 or state_of(job) in ENDED)
        wait_for_rows(tmp_path, job, rows_of(workdir) + 1)
        subprocess.run(["scancel", job], check=True, timeout=30)
        wait_until(lambda: state_of(job) in ENDED)
        log = log_of(tmp_path)
        assert state_of(job) == "CANCELLED", log
        for line in ("start 1: 2 processes", "saved; the job is queued again", "start 2: 2 processes"):
            assert log.count(line) == 1, log
        run_to_end(["srun", "--ntasks=1"], train_command(workdir, session_cache))
    check_starts(workdir, [2, 2, 1])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_open_mpi_resumes_after_a_host_was_killed(tmp_path, session_cache):
    """The engine ends the hosts that are left."""
    workdir, log_path = tmp_path / "run", tmp_path / "first.log"
    train, environment = train_command(workdir, session_cache), os.environ | ENVIRONMENT
    with log_path.open("w") as log:
        first = subprocess.Popen([*mpirun_on(3), *train], cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: first.poll() is not None or rows_of(workdir) >= 2)
        assert first.poll() is None, log_path.read_text()
        os.kill(hosts_of(workdir)[-1], signal.SIGKILL)
        assert first.wait(LIMIT_SEC) != 0
    finally:
        first.kill()
        first.wait()
    wait_until(lambda: not hosts_of(workdir))
    assert rows_of(workdir) < SETTINGS["train.outer_steps"]
    run_to_end(mpirun_on(2), train)
    check_starts(workdir, [3, 2])


def run_to_end(start: list[str], train: list[str]) -> None:
    environment = os.environ | ENVIRONMENT
    command = [*start, *train]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SEC)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "is_queued_again", "workdir"), [(2, False, "/data/run"), (143, True, None)])
def test_what_the_slurm_file_calls(tmp_path, code, is_queued_again, workdir):
    for name, end in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\nexit {end}\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "WORKDIR")}
    variables = inherited | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    variables |= {"WORKDIR": workdir, "PYTHON": "python3.13"} if workdir else {}
    bash = ["bash", str(SBATCH_FILE), "--config.seed", "3"]
    done = subprocess.run(bash, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    python, folder = ("python3.13", workdir) if workdir else ("python", "runs/slurm-7")
    step = f"srun --wait=120 {python} train.py --workdir {folder} --config.seed 3"
    assert (tmp_path / "calls").read_text().splitlines() == [step, *["scontrol requeue 7"] * is_queued_again]


def test_the_slurm_file_outside_of_slurm_is_refused(tmp_path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    bash = [shutil.which("bash"), str(SBATCH_FILE)]
    done = subprocess.run(bash, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "slurm.sbatch: not in a job of Slurm; start it by: sbatch launch/slurm.sbatch ...\n"
    variables["SLURM_JOB_ID"] = "7"
    done = subprocess.run(bash, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"slurm.sbatch: there is no train.py in {tmp_path}; submit the job from")

"""Runs that Slurm and Open MPI stop and start again, with the bits of one that nobody stopped; on one machine."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from engines import (
    ENVIRONMENT,
    LIMIT_SEC,
    SETTINGS,
    fields_of,
    hosts_of,
    mpirun_on,
    rows_of,
    slurm_cluster,
    starts_of,
    train_command,
    wait_until,
)
from test_resume import assert_same_run

SBATCH_FILE = ROOT / "launch" / "slurm.sbatch"
# The file as it is, on a cluster of one machine.
ON_ONE_MACHINE = ["--ntasks-per-node=2", "--overcommit"]


def submit(folder, cache_dir, *options: str) -> str:
    """Submits the file for a run of two processes in `folder`; returns the number of the job."""
    environment = os.environ | ENVIRONMENT | {"PYTHON": sys.executable, "WORKDIR": str(folder / "run")}
    command = ["sbatch", "--parsable", *ON_ONE_MACHINE, f"--output={folder / 'job.log'}", *options]
    command += [str(SBATCH_FILE), *fields_of(cache_dir)]
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
    wait_until(lambda: rows_of(folder / "run") >= count or state_of(job) in ("FAILED", "COMPLETED", "CANCELLED"))
    assert SETTINGS["train.outer_steps"] > rows_of(folder / "run") >= count, log_of(folder)


def folders(tmp_path):
    for name in ("disturbed", "undisturbed"):
        (tmp_path / name).mkdir()
    return tmp_path / "disturbed", tmp_path / "undisturbed"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_slurm_job_that_is_told_to_stop_is_queued_again_and_ends_with_the_same_bits(tmp_path, session_cache):
    disturbed, undisturbed = folders(tmp_path)
    with slurm_cluster(tmp_path):
        job = submit(disturbed, session_cache)
        wait_for_rows(disturbed, job, 2)
        subprocess.run(["scancel", "--signal=TERM", job], check=True, timeout=30)
        wait_until(lambda: state_of(job) == "COMPLETED" or state_of(job) == "FAILED")
        log = log_of(disturbed)
        assert state_of(job) == "COMPLETED", log
        for line in ("start 1: 2 processes", "saved; the job is queued again", "start 2: 2 processes"):
            assert line in log, log
        other = submit(undisturbed, session_cache)
        wait_until(lambda: state_of(other) in ("COMPLETED", "FAILED"))
        assert state_of(other) == "COMPLETED", log_of(undisturbed)
    starts = starts_of(disturbed / "run")
    assert [(start["hosts"], start["devices"]) for start in starts] == [(2, 2), (2, 2)]
    assert 0 < starts[1]["step"] < SETTINGS["train.outer_steps"] * SETTINGS["train.inner_steps"]
    assert len(starts_of(undisturbed / "run")) == 1
    assert_same_run(disturbed / "run", undisturbed / "run")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_slurm_job_that_is_cancelled_is_not_queued_again(tmp_path, session_cache):
    with slurm_cluster(tmp_path):
        job = submit(tmp_path, session_cache)
        wait_for_rows(tmp_path, job, 1)
        subprocess.run(["scancel", job], check=True, timeout=30)
        wait_until(lambda: state_of(job) not in ("RUNNING", "COMPLETING"))
        assert state_of(job) == "CANCELLED", log_of(tmp_path)
        assert "queued again" not in log_of(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_script_of_a_slurm_job_without_srun_is_refused_at_once(tmp_path, session_cache):
    train = " ".join(train_command(tmp_path / "run", session_cache))
    with slurm_cluster(tmp_path):
        command = ["sbatch", "--wait", "--ntasks=2", "--overcommit", f"--output={tmp_path / 'job.log'}"]
        done = subprocess.run([*command, f"--wrap={train}"], env=os.environ | ENVIRONMENT, timeout=LIMIT_SEC)
    assert done.returncode == 1
    assert "of a Slurm job of 2 tasks" in log_of(tmp_path)
    assert "srun python" in log_of(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_open_mpi_goes_on_with_the_same_bits(tmp_path, session_cache):
    disturbed, undisturbed = folders(tmp_path)
    environment = os.environ | ENVIRONMENT
    train = [*mpirun_on(2), *train_command(disturbed / "run", session_cache)]
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(train, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: first.poll() is not None or rows_of(disturbed / "run") >= 2)
        os.kill(hosts_of(disturbed / "run")[-1], signal.SIGTERM)  # mpirun itself would kill them after a second
        assert first.wait(LIMIT_SEC) == 143, (tmp_path / "first.log").read_text()
    finally:
        first.kill()
        first.wait()
    assert 2 <= rows_of(disturbed / "run") < SETTINGS["train.outer_steps"]
    again = [*mpirun_on(2), *train_command(undisturbed / "run", session_cache)]
    for command in (train, again):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SEC)
        assert done.returncode == 0, done.stdout + done.stderr
    starts = starts_of(disturbed / "run")
    assert [start["hosts"] for start in starts] == [2, 2]
    assert starts[1]["step"] > 0
    assert_same_run(disturbed / "run", undisturbed / "run")


@pytest.mark.parametrize(("code", "is_queued_again"), [(0, False), (1, False), (2, False), (143, True)])
@pytest.mark.parametrize("workdir", [None, "/data/run"])
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

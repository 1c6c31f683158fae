"""Runs that Slurm and Open MPI start, lose a host of, and start again on fewer; real ones, on one machine."""

import os
import signal
import subprocess

import pytest
from conftest import ROOT
from engines import (
    ENVIRONMENT,
    LIMIT_SEC,
    SETTINGS,
    hosts_of,
    mpirun_on,
    rows_of,
    slurm_cluster,
    starts_of,
    train_command,
    wait_until,
)


def check_that_fewer_hosts_go_on(start, tmp_path, cache_dir) -> None:
    """A run on 4 hosts loses one; on 2 it goes on to its end."""
    workdir = tmp_path / "run"
    train, environment = train_command(workdir, cache_dir), os.environ | ENVIRONMENT
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
    starts = starts_of(workdir)
    assert [(event["hosts"], event["devices"]) for event in starts] == [(4, 4), (2, 2)]
    assert starts[1]["step"] > 0
    assert rows_of(workdir) == SETTINGS["train.outer_steps"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_slurm(tmp_path, session_cache):
    with slurm_cluster(tmp_path):
        check_that_fewer_hosts_go_on(
            lambda hosts: ["srun", "--overcommit", "--kill-on-bad-exit", f"--ntasks={hosts}"],
            tmp_path,
            session_cache,
        )


@pytest.mark.full
@pytest.mark.timeout(400)
def test_open_mpi(tmp_path, session_cache):
    check_that_fewer_hosts_go_on(mpirun_on, tmp_path, session_cache)

"""launch/tpu_vm.sh with a stub of gcloud, whose calls the real gcloud must accept where there is one."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPT = ROOT / "launch" / "tpu_vm.sh"
STUB = Path(__file__).with_name("stub_gcloud.py")
# The script on a worker: says which worker it is, and that it resumes where an earlier start has saved.
TRAINING = """
echo "$(basename $HOME): $1 in $(basename $PWD)"
[ -f ../../saved ] && echo "resumes" && exit 0
[ $(basename $HOME) = worker-0 ] && sleep 1 && touch ../../saved
exit 143
"""


@pytest.fixture
def cloud(tmp_path):
    """A cloud without a TPU, and a person who is logged in."""
    for name in ("bin", "bin-of-workers", "worker-0", "worker-1"):
        (tmp_path / name).mkdir()
    program(tmp_path / "bin" / "gcloud", f'exec {sys.executable} {STUB} "$@"')
    program(tmp_path / "bin-of-workers" / "python3", f'echo "$@" >> {tmp_path}/installed')
    (tmp_path / "account").write_text("somebody@example.com")
    (tmp_path / "states").write_text("NONE WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def environment_of(cloud, **variables: str) -> dict[str, str]:
    variables = {"ZONE": "us-central2-b", "ACCELERATOR": "v4-16", "POLL_SEC": "0", "SETTLE_SEC": "1"} | variables
    return os.environ | {"FAKE_CLOUD": str(cloud), "PATH": f"{cloud / 'bin'}:{os.environ['PATH']}"} | variables


def tpu_vm(cloud, *arguments: str, cwd=ROOT, **variables: str) -> subprocess.CompletedProcess:
    environment = environment_of(cloud, **variables)
    return subprocess.run(
        [str(SCRIPT), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def calls_of(cloud) -> list[list[str]]:
    """The calls, less the question who is logged in."""
    lines = (cloud / "calls.jsonl").read_text().splitlines() if (cloud / "calls.jsonl").exists() else []
    return [call for call in map(json.loads, lines) if call[0] == "compute"]


def names_of(calls: list[list[str]]) -> list[str]:
    """ "create", "ssh all", ...: what was called, a question for the state only once in a row."""
    names = []
    for call in calls:
        worker = [word.split("=")[1] for word in call if word.startswith("--worker=")]
        name = " ".join([call[3], *worker])
        if name != "describe" or names[-1:] != ["describe"]:
            names.append(name)
    return names


def small_project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text("the program")
    (folder / "runs").mkdir()
    (folder / "runs" / "large").write_text("not to be copied")
    return folder


@pytest.fixture
def after_preemption(cloud):
    """A run that was pre-empted once: what it said, and the calls."""
    (cloud / "states").write_text(
        "NONE WAITING_FOR_RESOURCES PROVISIONING ACTIVE ACTIVE SUSPENDING SUSPENDING SUSPENDED ACTIVE"
    )
    command = ["bash", "-c", TRAINING, "bash", "a  b"]
    return tpu_vm(
        cloud, "run", "my-tpu", *command, cwd=small_project(cloud / "here"), SPOT="1", SETTLE_SEC="30"
    ), calls_of(cloud)


def test_a_run_that_is_preempted_starts_again_on_a_new_tpu(cloud, after_preemption):
    done, calls = after_preemption
    assert done.returncode == 0, done.stderr
    once = ["create", "describe", "scp all", "ssh all", "ssh all", "ssh 0", "ssh 0"]
    assert names_of(calls) == ["describe", *once, "describe", "delete", *once]
    assert calls[1] == [
        *["compute", "tpus", "queued-resources", "create", "my-tpu", "--node-id=my-tpu"],
        *["--accelerator-type=v4-16", "--runtime-version=tpu-ubuntu2204-base", "--spot"],
        *["--zone=us-central2-b", "--quiet"],
    ]
    # Worker 0's log is shown; the argument of two words arrived as one.
    assert done.stdout.splitlines() == [*["worker-0: a  b in largebatch"] * 2, "resumes"]
    assert "my-tpu was pre-empted; starting again" in done.stderr
    assert (cloud / "worker-1/largebatch.log").read_text() == "worker-1: a  b in largebatch\nresumes\n"
    for worker in ("worker-0", "worker-1"):
        assert (cloud / worker / "largebatch/train.py").read_text() == "the program"
        assert not (cloud / worker / "largebatch/runs").exists()
    assert "pip install --quiet -r requirements-tpu.txt gcsfs" in (cloud / "installed").read_text()


@pytest.mark.full
def test_the_real_gcloud_knows_every_flag(after_preemption, tmp_path):
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    kinds = {tuple(call[2:4]): call for call in after_preemption[1]}
    assert len(kinds) == 5
    for call in kinds.values():
        # Nobody is logged in there, so that nothing is asked of the cloud; flags are read before that.
        environment = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path / "nobody"), "CLOUDSDK_CORE_PROJECT": "none"}
        done = subprocess.run(["gcloud", *call], env=environment, capture_output=True, text=True, timeout=60)
        assert "You do not currently have an active account" in done.stderr, (call, done.stderr)


@pytest.mark.parametrize(("code", "afterwards"), [(3, "SUSPENDED"), (143, "ACTIVE")])
def test_what_ends_by_itself_is_not_started_again(cloud, code, afterwards):
    (cloud / "states").write_text(f"ACTIVE {afterwards}")
    done = tpu_vm(cloud, "run", "my-tpu", "bash", "-c", f"exit {code}", cwd=small_project(cloud / "here"))
    assert done.returncode == code, done.stderr
    assert f"the command ended with {code}; to give the TPU back: launch/tpu_vm.sh delete my-tpu" in done.stderr
    assert names_of(calls_of(cloud)).count("scp all") == 1


def test_a_command_that_runs_is_stopped_and_not_started_twice(cloud):
    (cloud / "worker-0/largebatch").mkdir()
    (cloud / "worker-1/largebatch").mkdir()
    catch = "trap 'echo saving; exit 143' TERM; echo ready; while true; do sleep 0.1; done"
    started = tpu_vm(cloud, "start", "my-tpu", "bash", "-c", catch)
    assert started.returncode == 0, started.stderr
    log = cloud / "worker-0/largebatch.log"
    deadline = time.monotonic() + 20
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = tpu_vm(cloud, "start", "my-tpu", "true")
    assert again.returncode == 1
    assert "a command is running here already" in again.stderr
    following = subprocess.Popen(
        [str(SCRIPT), "follow", "my-tpu"], env=environment_of(cloud), stdout=subprocess.PIPE, text=True
    )
    try:
        assert tpu_vm(cloud, "stop", "my-tpu").returncode == 0
        shown, _ = following.communicate(timeout=20)
    finally:
        following.kill()
        for worker in ("worker-0", "worker-1"):  # if it was not stopped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int((cloud / worker / "largebatch/pid").read_text()), signal.SIGKILL)
    assert following.returncode == 143
    assert shown.splitlines() == ["ready", "saving"]
    gone = tpu_vm(cloud, "stop", "my-tpu")
    assert (gone.returncode, gone.stderr) == (1, "tpu_vm.sh: my-tpu: no command is running on some worker\n")


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (["launch", "my-tpu"], {}, "'launch'; allowed: run, create, copy, start, follow, stop or delete"),
        (["create", "My_TPU"], {}, "name 'My_TPU'; allowed: lower-case letters, digits and hyphens"),
        (["create", "my-tpu"], {"ACCELERATOR": ""}, "ACCELERATOR is not set; for example ACCELERATOR=v4-32"),
        (["run", "my-tpu"], {}, "no command; allowed: run NAME python train.py ..."),
    ],
)
def test_wrong_usage_is_one_line(cloud, arguments, variables, line):
    done = tpu_vm(cloud, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"tpu_vm.sh: {line}")
    assert calls_of(cloud) == []


def test_what_the_cloud_refuses_is_one_line(cloud):
    (cloud / "refuses").touch()
    done = tpu_vm(cloud, "create", "my-tpu")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "tpu_vm.sh: gcloud compute tpus queued-resources create, my-tpu: "
        "ERROR: (gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: no quota"
    )
    (cloud / "refuses").unlink()
    (cloud / "states").write_text("NONE WAITING_FOR_RESOURCES FAILED")
    done = tpu_vm(cloud, "run", "my-tpu", "true")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "tpu_vm.sh: my-tpu: FAILED; gcloud compute tpus queued-resources"
    )
    assert "scp all" not in names_of(calls_of(cloud))


def test_without_credentials_nothing_is_called(cloud):
    (cloud / "account").unlink()
    done = tpu_vm(cloud, "create", "my-tpu")
    message = "tpu_vm.sh: gcloud has no credentials; log in by: gcloud auth login\n"
    assert (done.returncode, done.stderr) == (1, message)
    assert calls_of(cloud) == []

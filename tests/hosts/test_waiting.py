"""Hosts wait for each other's slow work, however long it takes, and each error of one is told by all."""

import json
import signal
import subprocess
import sys
import time

import jax
import pytest
from conftest import ROOT, on_devices, run_script

from largebatch.hosts import collectives, start
from largebatch.util import UserError

PATHS = {"PYTHONPATH": str(ROOT)}


def pod_arguments(*script) -> list[str]:
    """Of a pod of two hosts that run a Python script, with arguments."""
    return [str(part) for part in ("-m", "largebatch.pod", "--hosts", 2, "--devices", 2, "--", *script)]


def slow_build(folder, seconds: float, *more: str) -> list[str]:
    """Of a pod of two hosts that train tests/hosts/slow_build.py's run."""
    return pod_arguments(sys.executable, ROOT / "tests" / "hosts" / "slow_build.py", folder, seconds, *more)


def run_apart(folder, code: str) -> tuple[int, list[str]]:
    """Runs Python code on two hosts; the exit code of the pod, and what each host said on stderr."""
    (folder / "code.py").write_text(code)
    host = f"{sys.executable} {folder}/code.py 2>{folder}/$LARGEBATCH_HOST_INDEX.err"
    done = run_script(*pod_arguments("sh", "-c", host), env=PATHS)
    return done.returncode, [(folder / f"{index}.err").read_text() for index in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.faults)])
def test_hosts_wait_for_a_build(tmp_path, seconds):
    """And then train; texts of any length arrive, and gathers of one shape compile once."""
    done = run_script(*slow_build(tmp_path, seconds), env=PATHS)
    assert done.returncode == 0, done.stderr
    hosts = [json.loads((tmp_path / f"{host}.json").read_text()) for host in range(2)]
    assert [(host["status"], host["steps"]) for host in hosts] == [("done", 2)] * 2
    assert len({host["params_sha256"] for host in hosts}) == 1
    for host in hosts:
        assert host["texts"] == [["host 0 é\0", 9], ["host 1 é\0", 9 + (8 << 20)]]
        assert host["compiled by 20 gathers"] == 0


@pytest.mark.full
@pytest.mark.parametrize(("patience", "code"), [(None, 0), (1, 1)])
def test_the_time_limit_of_collectives_is_that_of_start(tmp_path, patience, code):
    """What JAX makes of the flags, which it reads once; a collective that fails is one line."""
    script = (
        "import time, jax; from largebatch import cli; from largebatch.hosts import collectives, start\n"
        f"if {patience}: start.PATIENCE_FLAGS['xla_cpu_collective_timeout_seconds'] = {patience}\n"
        "def main():\n"
        "    start.start_jax()\n"
        "    time.sleep(4 - 4 * jax.process_index())\n"
        "    collectives.gather_text('')\n"
        "cli.exit_after(main)"
    )
    returned, told = run_apart(tmp_path, script)
    assert returned == code, told
    assert min(start.PATIENCE_FLAGS.values()) >= 24 * 3600
    if code:  # the other host was on its way when the pod ended it
        lines = [line for line in told[1].splitlines() if "Gloo" in line]
        assert len(lines) == 1, told
        assert lines[0].startswith("code.py: error: a collective failed, probably since another host died or was")
        assert "Traceback" not in told[1]


@pytest.mark.full
@pytest.mark.parametrize("method", ["save", "_write"])  # _write works in the background
def test_all_hosts_learn_that_one_cannot_save(tmp_path, method):
    command = f"{sys.executable} {ROOT}/tests/hosts/slow_build.py {tmp_path} 0 {method}"
    done = run_script(*pod_arguments("sh", "-c", f"{command} 2>{tmp_path}/$LARGEBATCH_HOST_INDEX.err"), env=PATHS)
    assert done.returncode == 1, done.stderr
    for host in range(2):
        told = (tmp_path / f"{host}.err").read_text()
        assert told.splitlines()[-1] == "slow_build.py: error: --workdir: no space left", told


@pytest.mark.full
@pytest.mark.parametrize(("late", "num_told"), [(2, 2), (3600, 1)])
def test_an_agreed_error_is_told_by_late_hosts_too(late, num_told, tmp_path):
    """Host 1 is seconds late with it, or never comes to it."""
    code = (
        "import time, jax; from largebatch import cli, util; from largebatch.hosts import start\n"
        "def main():\n"
        "    start.start_jax()\n"
        f"    time.sleep({late} * jax.process_index())\n"
        "    raise util.UserError('no space left')\n"
        "cli.exit_after(main)"
    )
    returned, told = run_apart(tmp_path, code)
    assert returned == 1, told
    assert all(text.startswith("code.py: error: no space left\n") for text in told[:num_told]), told


@pytest.mark.full
def test_a_host_whose_error_nobody_reads_ends_all_the_same(tmp_path):
    """As where its launcher was killed; the other host waits for it."""
    code = (
        "import os, jax; from largebatch import cli, util; from largebatch.hosts import collectives, start\n"
        "def main():\n"
        "    start.start_jax()\n"
        "    if jax.process_index() == 0:\n"
        "        os.close(2)\n"
        "        raise util.UserError('no space left')\n"
        "    collectives.gather_text('')\n"
        "cli.exit_after(main)"
    )
    returned, told = run_apart(tmp_path, code)
    assert returned == 1, told


@pytest.mark.full
def test_a_platform_that_is_not_there_is_a_line_on_each_host(tmp_path):
    code = "from largebatch import cli; from largebatch.hosts import start\n"
    returned, told = run_apart(tmp_path, code + "cli.exit_after(lambda: start.start_jax('gpu'))")
    assert returned == 1, told
    for text in told:
        assert text.startswith("code.py: error: devices.platform: 'gpu' has no device on this host ("), text
        assert text.count("\n") == 1


@pytest.mark.full
def test_ctrl_c_ends_the_wait_for_another_host(tmp_path):
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *slow_build(tmp_path, 3600)]
    pod = subprocess.Popen(command, cwd=ROOT, env=on_devices(1) | PATHS, **output)
    try:
        while not (tmp_path / "building").exists():
            assert pod.poll() is None, pod.stderr.read()
            time.sleep(0.1)
        time.sleep(2)  # the other host waits in a collective
        pod.send_signal(signal.SIGINT)
        _, stderr = pod.communicate(timeout=60)
    finally:
        pod.kill()
        pod.stderr.close()
        pod.wait()
    assert pod.returncode == 128 + signal.SIGINT, stderr


# ---- without other hosts ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError, ValueError])
def test_a_host_that_died_is_one_line(monkeypatch, error):
    def fail(_):
        raise error("UNAVAILABLE: Gloo AllGather failed:\nmore")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(collectives.multihost_utils, "process_allgather", fail)
    with pytest.raises(UserError, match=r"another host died.*\(UNAVAILABLE: Gloo AllGather failed:\)") as raised:
        collectives.gather_text("mine")
    assert "\n" not in str(raised.value)


def test_one_host_alone_meets_itself():
    assert collectives.gather_text("alone") == ["alone"]
    assert collectives.json_from_primary({"a": [None, 1]}) == {"a": [None, 1]}

"""Hosts wait for each other's slow work, however long it takes, and each error of one is told by all."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, on_devices, run_script
from machines import QUICKLY

from largebatch.hosts import start

SLOW_BUILD = ROOT / "tests" / "hosts" / "slow_build.py"


def pod_arguments(*script) -> list[str]:
    """Return the arguments of a pod of two hosts that run a Python script."""
    return [str(part) for part in ("-m", "largebatch.pod", "--hosts", 2, "--devices", 2, "--", *script)]


def run_apart(folder, *script) -> tuple[int, list[str]]:
    """Run a Python script on two hosts; return the exit code of the pod, and what each host said on stderr."""
    host = f"{sys.executable} {' '.join(map(str, script))} 2>{folder}/$LARGEBATCH_HOST_INDEX.err"
    done = run_script(*pod_arguments("sh", "-c", host), env=QUICKLY)
    return done.returncode, [(folder / f"{index}.err").read_text() for index in range(2)]


def run_code(folder, *lines: str) -> tuple[int, list[str]]:
    """Run a function with these lines on two hosts; see `run_apart`."""
    imports = (
        "import os, time, jax\nfrom largebatch import cli, util\nfrom largebatch.hosts import collectives, start\n"
    )
    body = "".join(f"    {line}\n" for line in lines)
    (folder / "code.py").write_text(f"{imports}def main():\n{body}cli.exit_after(main)\n")
    return run_apart(folder, folder / "code.py")


@pytest.mark.full
def test_a_collective_that_fails_is_one_line(tmp_path):
    """It fails by the time limit, which JAX reads once; that of `start` is a day or more."""
    assert min(start.PATIENCE_FLAGS.values()) >= 24 * 3600
    code, told = run_code(
        tmp_path,
        "start.PATIENCE_FLAGS['xla_cpu_collective_timeout_seconds'] = 1",
        "start.start_jax()",
        "time.sleep(4 - 4 * jax.process_index())",
        "collectives.gather_text('')",
    )
    assert code == 1, told  # the other host was on its way when the pod ended it
    [line] = [line for line in told[1].splitlines() if "Gloo" in line]
    assert line.startswith("code.py: error: a collective failed, probably since another host died or was")
    assert "Traceback" not in told[1]


@pytest.mark.full
def test_all_hosts_learn_that_one_cannot_save_in_the_background(tmp_path):
    code, told = run_apart(tmp_path, SLOW_BUILD, tmp_path, 0, "_write")
    assert code == 1, told
    for text in told:
        assert text.splitlines()[-1] == "slow_build.py: error: --workdir: no space left", text


@pytest.mark.full
@pytest.mark.parametrize(("late", "num_told"), [(2, 2), (3600, 1)])
def test_an_agreed_error_is_told_by_late_hosts_too(late, num_told, tmp_path):
    """Host 1 is seconds late with it, or never comes to it."""
    lines = f"time.sleep({late} * jax.process_index())", "raise util.UserError('no space left')"
    code, told = run_code(tmp_path, "start.start_jax()", *lines)
    assert code == 1, told
    assert all(text.startswith("code.py: error: no space left\n") for text in told[:num_told]), told


@pytest.mark.full
def test_a_platform_that_is_not_there_is_a_line_on_each_host(tmp_path):
    code, told = run_code(tmp_path, "start.start_jax('gpu')")
    assert code == 1, told
    for text in told:
        assert text.startswith("code.py: error: devices.platform: 'gpu' has no device on this host ("), text
        assert text.count("\n") == 1


@pytest.mark.full
def test_ctrl_c_ends_the_wait_for_another_host(tmp_path):
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *pod_arguments(sys.executable, SLOW_BUILD, tmp_path, 3600)]
    pod = subprocess.Popen(command, cwd=ROOT, env=on_devices(1) | QUICKLY, **output)
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

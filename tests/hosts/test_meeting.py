"""Hosts wait for each other's slow work outside of collectives, which give up."""

import json
import signal
import subprocess
import sys
import time

import jax
import pytest
from conftest import ROOT, on_devices, run_script

from largebatch.hosts import collectives, rendezvous
from largebatch.util import UserError

PATHS = {"PYTHONPATH": str(ROOT)}


def pod_arguments(folder, seconds: float, *more: str) -> list[str]:
    """Of a pod of two hosts that train tests/hosts/held_build.py's run."""
    script = [sys.executable, ROOT / "tests" / "hosts" / "held_build.py", folder, seconds, *more]
    return [str(part) for part in ("-m", "largebatch.pod", "--hosts", 2, "--devices", 1, "--", *script)]


def results(folder) -> dict[str, dict]:
    """What each host found, by host."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.faults)])
def test_hosts_wait_for_a_build_outside_of_collectives(tmp_path, seconds):
    """And then train; meetings leave nothing behind, and gathers of one shape compile once."""
    done = run_script(*pod_arguments(tmp_path, seconds), env=PATHS)
    assert done.returncode == 0, done.stderr
    hosts = list(results(tmp_path).values())
    assert hosts[1]["samples"] >= 3
    assert hosts[1]["most in a collective"] == 0
    assert hosts[1]["waited to the end"]
    assert [(host["status"], host["steps"]) for host in hosts] == [("done", 2)] * 2
    assert len({host["params_sha256"] for host in hosts}) == 1
    for host in hosts:
        assert host["texts"] == [["host 0 é\0", 9], ["host 1 é\0", 9 + (8 << 20)]]
        assert host["keys left"] <= 2
        assert host["compiled by 20 gathers"] == 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["save", "_write"])  # _write works in the background
def test_all_hosts_learn_that_one_cannot_save(tmp_path, method):
    done = run_script(*pod_arguments(tmp_path, 0, method), env=PATHS)
    assert done.returncode == 1, done.stderr
    assert results(tmp_path) == {host: {"error": "--workdir: no space left"} for host in "01"}


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
    (tmp_path / "fail.py").write_text(code)
    host = f"{sys.executable} {tmp_path}/fail.py 2>{tmp_path}/$LARGEBATCH_HOST_INDEX.err"
    done = run_script("-m", "largebatch.pod", "--hosts", 2, "--devices", 1, "--", "sh", "-c", host, env=PATHS)
    assert done.returncode == 1, done.stderr
    told = [(tmp_path / f"{index}.err").read_text() for index in range(num_told)]
    assert all(text.startswith("fail.py: error: no space left\n") for text in told), told


def test_ctrl_c_ends_the_wait_for_another_host(tmp_path):
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *pod_arguments(tmp_path, 3600)]
    pod = subprocess.Popen(command, cwd=ROOT, env=on_devices(1) | PATHS, **output)
    try:
        while not (tmp_path / "arrived").exists():
            assert pod.poll() is None, pod.stderr.read()
            time.sleep(0.1)
        time.sleep(1.5)  # past the first wait, where the other host only asks now and then
        pod.send_signal(signal.SIGINT)
        _, stderr = pod.communicate(timeout=60)
    finally:
        pod.kill()
        pod.stderr.close()
        pod.wait()
    assert pod.returncode == 128 + signal.SIGINT, stderr


# ---- without other hosts ----------------------------------------------------------------------------


class Store:
    """In place of the coordination service: `gets` are its answers, an exception is raised."""

    def __init__(self, gets: list):
        self.gets, self.here = iter(gets), {}

    def key_value_set(self, key, value):
        self.here[key] = value

    def key_value_delete(self, key):
        del self.here[key]

    def blocking_key_value_get(self, key, _):
        return self.key_value_try_get(key)

    def key_value_try_get(self, key):
        answer = next(self.gets)
        if isinstance(answer, Exception):
            raise answer
        return answer


LATE = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
NOT_YET = jax.errors.JaxRuntimeError("NOT_FOUND: Config key not found")
DEAD = jax.errors.JaxRuntimeError("UNAVAILABLE: The following tasks are unhealthy:\n1")


@pytest.fixture
def two_hosts(monkeypatch):
    """This one is host 0; the function returned puts answers of the other host in the store."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(rendezvous, "SHORT_POLL_SEC", 0.0)

    def answers(*gets):
        store = Store(list(gets))
        monkeypatch.setattr(rendezvous, "_store", lambda: store)
        return store

    return answers


def test_a_host_that_is_late_is_waited_for(two_hosts):
    store = two_hosts(LATE, *[NOT_YET] * 5000, "other")
    assert collectives.gather_text("mine") == ["mine", "other"]
    assert [json.loads(answer) for answer in store.here.values()] == [["mine", "other"]]


@pytest.mark.parametrize("before", [[], [LATE], [LATE, NOT_YET]])
def test_a_host_that_died_is_one_line(two_hosts, before):
    two_hosts(*before, DEAD)
    with pytest.raises(UserError, match=r"another host died.*\(UNAVAILABLE: .*unhealthy:\)") as raised:
        collectives.gather_text("mine")
    assert "\n" not in str(raised.value)


def test_one_host_alone_meets_itself():
    assert collectives.gather_text("alone") == ["alone"]
    assert collectives.json_from_primary({"a": [None, 1]}) == {"a": [None, 1]}

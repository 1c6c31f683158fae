"""A host that dies, with no parent process to notice: the others end by themselves, and a start goes on."""

import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT, on_devices
from figures import record
from test_pod import pod_command, train_command

from largebatch.pod import free_port

NUM_HOSTS, DEVICES, LIMIT_SEC = 4, 8, 30.0


def start_hosts(command: list[str], folder) -> list[subprocess.Popen]:
    """The hosts of a pod as a cluster would start them, each on its own."""
    address, processes = f"127.0.0.1:{free_port()}", []
    flags = os.environ.get("XLA_FLAGS", "")
    for host in range(NUM_HOSTS):
        environment = on_devices(DEVICES) | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address,
            "LARGEBATCH_NUM_HOSTS": str(NUM_HOSTS),
            "LARGEBATCH_HOST_INDEX": str(host),
            "XLA_FLAGS": f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=3600",
        }
        with (folder / f"host_{host}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    return processes


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", range(NUM_HOSTS))
def test_the_hosts_left_end_within_30_s_and_a_start_goes_on(victim, tmp_path):
    command = train_command(tmp_path, "run", **{"train.outer_steps": 100_000})
    processes = start_hosts(command, tmp_path)
    try:
        while not list((tmp_path / "run" / "checkpoints").glob("*[1-9]")):
            assert all(process.poll() is None for process in processes), (tmp_path / "host_0.log").read_text()
            time.sleep(0.1)
        time.sleep(1)
        processes[victim].kill()
        begin = time.monotonic()
        for process in processes:
            process.wait(max(LIMIT_SEC - (time.monotonic() - begin), 0))
        seconds = time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode != 0 for process in processes)
    saved = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
    arguments = pod_command(train_command(tmp_path, "run", **{"train.outer_steps": 100_000}), NUM_HOSTS, DEVICES)
    again = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    told = next((line for line in again.stderr if "resuming at step" in line), "")
    again.terminate()
    _, rest = again.communicate(timeout=120)
    assert again.returncode == 143, rest
    assert f"resuming at step {saved}" in told
    # JAX aborts a host that lost another, or raises first.
    assert "was killed, or a host died" in told or "the process before failed (a collective" in told
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "failed"] == ["start", "start", "interrupted"]
    record("a dead host", {"victim": victim, "seconds until the others ended": round(seconds, 1)})

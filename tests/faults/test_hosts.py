"""A host that dies, with no parent process to notice: the others end by themselves."""

import os
import subprocess
import time

import pytest
from conftest import ROOT, on_devices
from figures import record
from test_pod import train_command

from largebatch.pod import free_port

NUM_HOSTS, LIMIT_SEC = 4, 30.0


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, NUM_HOSTS - 1])
def test_the_hosts_left_end_within_30_s(victim, tmp_path):
    command = train_command(tmp_path, "run", **{"train.outer_steps": 100_000})
    address, flags, processes = f"127.0.0.1:{free_port()}", os.environ.get("XLA_FLAGS", ""), []
    for host in range(NUM_HOSTS):  # as a cluster would start them, each on its own
        environment = on_devices(2) | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": address,
            "LARGEBATCH_NUM_HOSTS": str(NUM_HOSTS),
            "LARGEBATCH_HOST_INDEX": str(host),
            "XLA_FLAGS": f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=3600",
        }
        with (tmp_path / f"host_{host}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        while not list((tmp_path / "run" / "checkpoints").glob("*[1-9]")):
            assert all(process.poll() is None for process in processes), (tmp_path / "host_0.log").read_text()
            time.sleep(0.1)
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
    record("a dead host", {"victim": victim, "seconds until the others ended": round(seconds, 1)})

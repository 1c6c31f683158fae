"""A pod of two processes, one of which is held up: it is the one that rows and terminal name."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT
from test_pod import host_of, pod_command, processes_with, train_command

STOPPED_SEC, RUNNING_SEC = 0.018, 0.002  # of a turn; a tenth of the speed


def hold_up(pid: int) -> None:
    """Stops a process again and again, until it has ended."""
    with contextlib.suppress(OSError):  # else the turns are as even as a busy machine lets them be
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # of this thread
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_SEC)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNNING_SEC)


@pytest.mark.full
@pytest.mark.parametrize("slow", [0, 1])
def test_a_host_that_is_held_up_is_named(tmp_path, slow):
    """A tenth of the speed is 10 / 5.5 = 1.8 times the median of two."""
    fields = {"train.inner_steps": 4, "train.outer_steps": 8, "batch.size": 64, "dataset.num_examples": 400}
    python, *train = train_command(tmp_path, "run", **fields)
    command = pod_command([python, str(ROOT / "tests" / "pod" / "often_probed.py"), *train], 2, 1)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, **options) as pod:
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            while not metrics.exists():
                assert pod.poll() is None, pod.stderr.read()
                time.sleep(0.1)
            hosts = {host_of(pid): pid for pid in processes_with(str(tmp_path / "run")) if pid != pod.pid}
            threading.Thread(target=hold_up, args=(hosts[str(slow)],), daemon=True).start()
            stdout, stderr = pod.communicate(timeout=400)
        finally:
            pod.kill()
    assert pod.returncode == 0, stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) == 8
    told = rows[-5:]  # probed while the host was held up, and only then
    assert [row["slowest_host"] for row in told].count(slow) >= 4, told
    assert np.median([row["slowest_host_ratio"] for row in told]) > 1.2, told
    assert f"  host {slow} takes 1." in stdout

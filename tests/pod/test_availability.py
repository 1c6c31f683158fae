"""Pods whose hosts come and go as a trace says, over a small script in place of train.py."""

import argparse
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT

from largebatch import pod
from largebatch.util import UserError

# Each host adds a line "START INDEX/COUNT" to the file and then does what the plan says of this start: ends with an
# exit code, "kill" (the last host dies, the others hang on), "wait" (until SIGTERM, which ends it with 143), "save"
# (which takes 2 s after SIGTERM, and is lost at a second one: 99), "early" (SIGTERM finds no answer yet and kills),
# or "full" (SIGTERM finds a full disk: 1).
HOST = """
import os, signal, sys, time
path, *plan = sys.argv[1:]
host, count = int(os.environ["LARGEBATCH_HOST_INDEX"]), int(os.environ["LARGEBATCH_NUM_HOSTS"])
start = os.environ["JAX_COORDINATOR_ADDRESS"]  # another one at every start
def stop(*_):
    if action == "save":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
        time.sleep(2)
    os._exit(1 if action == "full" else 143)
action = "wait"
signal.signal(signal.SIGTERM, stop)
with open(path, "a") as file:
    file.write(f"{start} {host}/{count}\\n")
time.sleep(0.3)
starts = list(dict.fromkeys(line.split()[0] for line in open(path)))
action = plan[min(starts.index(start), len(plan) - 1)]
if action == "kill" and host == count - 1:
    os.kill(os.getpid(), signal.SIGKILL)
if action == "early":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
if action in ("kill", "wait", "save", "early", "full"):
    time.sleep(60)
sys.exit(int(action))
"""
ONE_TWO = "time,GPUs\n0,1\n4,2\n"


@pytest.fixture
def start_pod(tmp_path):
    """start_pod(plan, trace, *flags) starts a pod of at most 3 hosts, whose n-th start does plan[n]."""
    (tmp_path / "host.py").write_text(HOST)
    pods = []

    def start(plan: str, trace: str | None = None, *flags: str) -> subprocess.Popen:
        if trace:
            (tmp_path / "trace.csv").write_text(trace)
            flags = (f"--availability={tmp_path / 'trace.csv'}", *flags)
        command = [sys.executable, "-m", "largebatch.pod", "--hosts=3", "--devices=1", *flags, "--"]
        command += [sys.executable, str(tmp_path / "host.py"), str(tmp_path / "starts"), *plan.split()]
        pods.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return pods[-1]

    yield start
    for started in pods:
        started.kill()
        started.stderr.close()
        started.wait()


def wait_for_hosts(started: subprocess.Popen, folder, count: int) -> None:
    """Until so many hosts have started in all, and know what to do."""
    path = folder / "starts"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.05)
    time.sleep(0.5)


def hosts_of_starts(folder) -> list[int]:
    """How many hosts each start of the command had."""
    counts = {}
    for line in (folder / "starts").read_text().splitlines():
        start, place = line.split()
        counts[start] = int(place.split("/")[1])
    return list(counts.values())


def test_hosts_come_and_go_as_a_trace_says(start_pod, tmp_path):
    trace = "time,GPUs\n100,8\n130,24\n160,0\n190,16\n"
    started = start_pod("wait wait 0", trace, "--trace_devices_per_host=8", "--trace_seconds_per_unit=0.1")
    _, told = started.communicate(timeout=60)
    assert started.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [1, 3, 2]
    assert [line.split(": ")[2] for line in told.splitlines()] == [
        f"starting on {hosts} hosts" for hosts in (1, 3, 2)
    ]


@pytest.mark.parametrize("trace", [None, ONE_TWO])
def test_a_signal_stops_the_pod(start_pod, tmp_path, trace):
    started = start_pod("wait", trace)
    wait_for_hosts(started, tmp_path, 1 if trace else 3)
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 143, told
    assert hosts_of_starts(tmp_path) == [1 if trace else 3]


def test_a_signal_while_hosts_save_for_others_does_not_stop_the_save(start_pod, tmp_path):
    started = start_pod("save", ONE_TWO)
    wait_for_hosts(started, tmp_path, 1)
    time.sleep(4)  # the second host is there
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 143, told
    assert hosts_of_starts(tmp_path) == [1]


def test_hosts_that_are_told_to_stop_before_they_answer_signals_have_not_failed(start_pod, tmp_path):
    started = start_pod("early 0", ONE_TWO)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [1, 2]
    assert "SIGTERM" not in told


@pytest.mark.parametrize(
    ("plan", "trace", "code", "hosts", "line"),
    [
        ("kill", None, 137, [3], "host 2 was killed by SIGKILL; ending the others"),
        ("7", ONE_TWO, 7, [1], "host 0 ended with exit code 7; ending the others"),
        ("full", ONE_TWO, 1, [1], "host 0 ended with exit code 1; ending the others"),  # it cannot save
        ("wait", "time,GPUs\n0,2\n4,0\n", 1, [2], "the trace ends without hosts (--availability)"),
    ],
)
def test_a_pod_that_cannot_go_on_says_so(start_pod, tmp_path, plan, trace, code, hosts, line):
    started = start_pod(plan, trace)
    _, told = started.communicate(timeout=60)
    assert started.returncode == code, told
    assert hosts_of_starts(tmp_path) == hosts
    assert f"pod: {line}\n" in told


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--trace_devices_per_host=0"], None, "--trace_devices_per_host must be at least 1"),
        (["--trace_seconds_per_unit=0"], None, "--trace_seconds_per_unit above 0"),
        (["--trace_seconds_per_unit=nan"], None, "--trace_seconds_per_unit above 0"),
        ([], "time,GPUs\n0,4\n1,5\n", "GPUs 4 at 0 is 4 hosts; allowed: up to 3 (--hosts)"),
        ([], "time,GPUs\n0,two\n", "line 2: GPUs 'two'; allowed: an integer"),
        ([], "step,batchsize\n0,1\n", "has the columns step, batchsize; allowed: a time or"),
        (["--availability=/no/file.csv"], None, "cannot be read (No such file"),
    ],
)
def test_bad_usage_is_one_line_with_code_2(flags, text, message, start_pod, tmp_path):
    started = start_pod("0", text, *flags)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 2
    assert message in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (tmp_path / "starts").exists()


def test_a_command_that_is_not_there_is_one_line():
    command = [sys.executable, "-m", "largebatch.pod", "--hosts=2", "--devices=1", "--", "no-such-command"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "python -m largebatch.pod: error: cannot run 'no-such-command'\n")


def test_a_trace_is_scaled_to_hosts_and_seconds(tmp_path):
    (tmp_path / "x.csv").write_text("time,GPUs\n50,9\n60,31\n80,16\n")
    given = argparse.Namespace(
        availability=str(tmp_path / "x.csv"), trace_devices_per_host=8, trace_seconds_per_unit=0.5, hosts=3
    )
    starts, counts = pod.read_availability(given)
    np.testing.assert_array_equal(starts, [0, 5, 15])
    np.testing.assert_array_equal(counts, [1, 3, 2])
    given.hosts = 2
    with pytest.raises(UserError, match=r"GPUs 31 at 60 is 3 hosts; allowed: up to 2"):
        pod.read_availability(given)

"""Pods whose hosts come and go as a trace says, over a small script in place of train.py."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

# Each host adds a line "START INDEX/COUNT" to the file and then does what the plan says of this start: ends with an
# exit code, "kill" (the last host dies, the others hang on), "wait" (until SIGTERM, which ends it with 143), "save"
# (which takes 2 s after SIGTERM, and is lost at a second one: 99), "full" (SIGTERM finds a full disk: 1), or
# "early" (it does not handle SIGTERM yet).
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
if action == "early":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
if action == "kill" and host == count - 1:
    os.kill(os.getpid(), signal.SIGKILL)
if action in ("kill", "wait", "save", "full", "early"):
    time.sleep(60)
sys.exit(int(action))
"""
ONE_TWO = "time,GPUs\n0,1\n2,2\n"


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
    """Wait until so many hosts have started in all, and know what to do."""
    path = folder / "starts"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.05)
    time.sleep(0.5)


def hosts_of_starts(folder) -> list[int]:
    """Return how many hosts each start of the command had."""
    counts = {}
    for line in (folder / "starts").read_text().splitlines():
        start, place = line.split()
        counts[start] = int(place.split("/")[1])
    return list(counts.values())


def end_of(started: subprocess.Popen, code: int) -> str:
    """Wait for the end of a pod, check its exit code, and return what it said."""
    _, told = started.communicate(timeout=60)
    assert started.returncode == code, told
    return told


def test_hosts_come_and_go_as_a_trace_says(start_pod, tmp_path):
    """The first is told to stop before it answers signals."""
    trace = "time,GPUs\n100,8\n120,24\n140,0\n145,16\n"
    started = start_pod("early wait 0", trace, "--trace_devices_per_host=8", "--trace_seconds_per_unit=0.1")
    told = end_of(started, 0)
    assert hosts_of_starts(tmp_path) == [1, 3, 2]
    lines = [line.split(": ")[2] for line in told.splitlines()]
    assert lines == ["starting on 1 host", "starting on 3 hosts", "starting on 2 hosts"]


@pytest.mark.parametrize("trace", [None, ONE_TWO])
def test_a_signal_stops_the_pod(start_pod, tmp_path, trace):
    started = start_pod("wait", trace)
    wait_for_hosts(started, tmp_path, 1 if trace else 3)
    started.send_signal(signal.SIGTERM)
    end_of(started, 143)
    assert hosts_of_starts(tmp_path) == [1 if trace else 3]


def test_a_signal_while_hosts_save_for_others_does_not_stop_the_save(start_pod, tmp_path):
    started = start_pod("save", ONE_TWO)
    wait_for_hosts(started, tmp_path, 1)
    time.sleep(2)  # the second host is there
    started.send_signal(signal.SIGTERM)
    end_of(started, 143)
    assert hosts_of_starts(tmp_path) == [1]


@pytest.mark.parametrize(
    ("plan", "trace", "code", "hosts", "line"),
    [
        ("kill", None, 137, [3], "host 2 was killed by SIGKILL; ending the others"),
        ("full", ONE_TWO, 1, [1], "host 0 ended with exit code 1; ending the others"),  # it cannot save
        ("wait", "time,GPUs\n0,2\n2,0\n", 1, [2], "the trace ends without hosts (--availability)"),
    ],
)
def test_a_pod_that_cannot_go_on_says_so(start_pod, tmp_path, plan, trace, code, hosts, line):
    told = end_of(start_pod(plan, trace), code)
    assert hosts_of_starts(tmp_path) == hosts
    assert f"pod: {line}\n" in told


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--trace_seconds_per_unit=nan"], None, "--trace_seconds_per_unit above 0"),
        ([], "time,GPUs\n0,4\n1,5\n", "GPUs 4 at 0 is 4 hosts; allowed: up to 3 (--hosts)"),
        (["--availability=/no/file.csv"], None, "cannot be read (No such file"),
    ],
)
def test_bad_usage_is_one_line_with_code_2(flags, text, message, start_pod, tmp_path):
    told = end_of(start_pod("0", text, *flags), 2)
    assert message in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (tmp_path / "starts").exists()

"""The supervisor of largebatch.pod, over a small script in place of train.py."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT

from largebatch.optim.traces import AvailableDevices
from largebatch.pod.availability import ReturningHosts, TracedHosts
from largebatch.pod.elastic import back_off_seconds
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


@pytest.fixture
def start_pod(tmp_path):
    """start_pod(plan, *flags) starts an elastic pod of at most 3 hosts, whose n-th start does plan[n]."""
    (tmp_path / "host.py").write_text(HOST)
    pods = []

    def start(plan: str, *flags: str) -> subprocess.Popen:
        pod = [sys.executable, "-m", "largebatch.pod", "--hosts=3", "--devices=1", "--elastic", *flags]
        command = [*pod, "--", sys.executable, str(tmp_path / "host.py"), str(tmp_path / "starts"), *plan.split()]
        pods.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return pods[-1]

    yield start
    for pod in pods:
        pod.kill()
        pod.stderr.close()
        pod.wait()


def wait_for_hosts(pod: subprocess.Popen, folder, count: int) -> None:
    """Until so many hosts have started in all, and know what to do."""
    path = folder / "starts"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert pod.poll() is None, pod.stderr.read()
        time.sleep(0.05)
    time.sleep(0.5)


def hosts_of_starts(folder) -> list[int]:
    """How many hosts each start of the command had."""
    counts = {}
    for line in (folder / "starts").read_text().splitlines():
        start, place = line.split()
        counts[start] = int(place.split("/")[1])
    return list(counts.values())


def test_a_pod_goes_on_with_the_hosts_that_are_left_and_grows_again(start_pod, tmp_path):
    pod = start_pod("kill wait 0", "--return_sec=4")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [3, 2, 3]
    assert "host 2 was killed by SIGKILL; ending the others" in told
    assert "2 hosts run and 3 are there: saving" in told


def test_a_pod_waits_for_enough_hosts(start_pod, tmp_path):
    pod = start_pod("kill 0", "--return_sec=2", "--min_hosts=3")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [3, 3]
    assert "waiting: 2 hosts are there, at least 3 are needed" in told


def test_a_command_that_fails_again_and_again_is_given_up(start_pod, tmp_path):
    pod = start_pod("7", "--retries=2")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 7
    assert hosts_of_starts(tmp_path) == [3, 3, 3]
    assert told.splitlines()[-1].endswith("giving up after 3 failures in a row (--retries)")


@pytest.mark.parametrize("code", [2, 3])
def test_wrong_usage_and_a_diverged_run_are_not_tried_again(code, start_pod, tmp_path):
    pod = start_pod(str(code))
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == code, told
    assert hosts_of_starts(tmp_path) == [3]


def test_a_start_that_lasted_ends_the_row_of_failures(start_pod):
    pod = start_pod("7 7 7 0", "--retries=1", "--healthy_sec=0")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told


def test_a_signal_stops_the_pod(start_pod, tmp_path):
    pod = start_pod("wait")
    wait_for_hosts(pod, tmp_path, 3)
    pod.send_signal(signal.SIGTERM)
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 143, told
    assert hosts_of_starts(tmp_path) == [3]


@pytest.mark.full
def test_hosts_come_and_go_as_a_trace_says(start_pod, tmp_path):
    (tmp_path / "trace.csv").write_text("time,GPUs\n100,8\n130,24\n160,0\n190,16\n")
    trace = [f"--availability={tmp_path / 'trace.csv'}", "--trace_devices_per_host=8"]
    pod = start_pod("wait wait 0", *trace, "--trace_seconds_per_unit=0.1")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [1, 3, 2]
    assert "waiting: 0 hosts are there" in told


@pytest.mark.full
def test_a_signal_while_hosts_save_for_others_does_not_stop_the_save(start_pod, tmp_path):
    pod = start_pod("kill save", "--return_sec=3")
    told = ""
    while "2 hosts run and 3 are there: saving" not in told:
        line = pod.stderr.readline()
        assert line, told
        told += line
    time.sleep(0.5)
    pod.send_signal(signal.SIGTERM)
    _, rest = pod.communicate(timeout=60)
    assert pod.returncode == 143, told + rest
    assert hosts_of_starts(tmp_path) == [3, 2]


@pytest.mark.full
def test_hosts_that_are_told_to_stop_before_they_answer_signals_have_not_failed(start_pod, tmp_path):
    pod = start_pod("kill early 0", "--return_sec=3", "--retries=1")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [3, 2, 3]
    assert "SIGTERM" not in told


def test_hosts_that_cannot_save_fail(start_pod, tmp_path):
    pod = start_pod("full")
    wait_for_hosts(pod, tmp_path, 3)
    pod.send_signal(signal.SIGTERM)
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 1
    assert "ended with exit code 1; ending the others" in told


def test_a_host_that_was_told_to_go_is_gone(start_pod, tmp_path):
    pod = start_pod("143 0", "--return_sec=inf", "--retries=0")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 0, told
    assert hosts_of_starts(tmp_path) == [3, 2]
    assert "a host was told to go; all have stopped" in told


def test_a_pod_gives_up_when_too_few_hosts_are_left(start_pod):
    pod = start_pod("kill 0", "--return_sec=inf", "--min_hosts=3")
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 1
    assert told.splitlines()[-1].endswith("giving up: there will not be 3 hosts any more")


@pytest.mark.parametrize(
    ("flags", "text", "message"),
    [
        (["--min_hosts=4"], None, "--min_hosts: 4; allowed: 1 to --hosts 3"),
        (["--retries=-1"], None, "--retries must be at least 0"),
        (["--availability=FILE", "--return_sec=5"], None, "--return_sec: given; allowed: without --availability"),
        (["--trace_seconds_per_unit=1"], None, "--trace_seconds_per_unit: given; allowed: with --availability"),
        (["--availability=FILE", "--trace_seconds_per_unit=0"], None, "--trace_seconds_per_unit above 0"),
        (["--availability=FILE"], "time,GPUs\n0,4\n1,5\n", "GPUs 4 at 0 is 4 hosts; allowed: up to 3"),
        (["--availability=FILE"], "time,GPUs\n0,two\n", "line 2: GPUs 'two'; allowed: an integer"),
        (["--availability=FILE"], "step,batchsize\n0,1\n", "has the columns step, batchsize; allowed: a time or"),
        (["--availability=FILE"], None, "cannot be read (No such file"),
    ],
)
def test_bad_usage_is_one_line_with_code_2(flags, text, message, start_pod, tmp_path):
    if text:
        (tmp_path / "trace.csv").write_text(text)
    pod = start_pod("0", *(flag.replace("FILE", str(tmp_path / "trace.csv")) for flag in flags))
    _, told = pod.communicate(timeout=60)
    assert pod.returncode == 2
    assert message in told.splitlines()[-1]
    assert "Traceback" not in told
    assert not (tmp_path / "starts").exists()


def test_dead_hosts_are_there_again_after_a_while():
    hosts = ReturningHosts(4, return_sec=10)
    hosts.lose(1, seconds=5)
    assert hosts.count(5) == 3
    hosts.lose(2, seconds=12)
    assert [hosts.count(second) for second in (12, 14.9, 15, 22)] == [1, 1, 2, 4]
    assert not hosts.is_over(21)
    assert hosts.is_over(22)


def test_a_trace_is_scaled_to_hosts_and_seconds():
    devices = AvailableDevices("x.csv", "GPUs", times=np.array([50.0, 60.0, 80.0]), counts=np.array([9, 31, 16]))
    hosts = TracedHosts.scaled(devices, per_host=8, seconds_per_unit=0.5, max_hosts=3)
    assert [hosts.count(second) for second in (0, 4.9, 5, 14.9, 15, 1e9)] == [1, 1, 3, 3, 2, 2]
    assert not hosts.is_over(14)
    assert hosts.is_over(15)
    with pytest.raises(UserError, match=r"GPUs 31 at 60 is 3 hosts; allowed: up to 2"):
        TracedHosts.scaled(devices, per_host=8, seconds_per_unit=0.5, max_hosts=2)


def test_waits_between_failures_grow():
    assert [back_off_seconds(failures) for failures in (0, 1, 2, 3, 4, 20, 5000)] == [0, 0, 1, 2, 4, 60, 60]

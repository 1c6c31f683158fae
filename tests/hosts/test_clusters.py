"""The place of a host among others, by what is given and by the variables of launchers, and its GPUs."""

import os
import subprocess
import sys
from unittest.mock import Mock

import jax
import pytest
from conftest import ROOT, assert_one_line_error, run_script

from largebatch.hosts import clusters, memory, start
from largebatch.hosts.clusters import Here, find_place, share_gpus
from largebatch.pod import free_port
from largebatch.util import UserError

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "MPI_", "TPU_", "JOB_", "JAX_COORD", "LARGEBATCH_", "CUDA_", "KUBERNETES_")
# As a step of `srun --nodes=2 --ntasks-per-node=1` has it on the second node.
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
}
SLURM_PORT = 12 + 65536 - 4096
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_PORT = 1531576320 // 4096 % 4096 + 65536 - 4096
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI_4.items() if "hnp" not in name}
POD = {
    "LARGEBATCH_NUM_HOSTS": "3",
    "LARGEBATCH_HOST_INDEX": "2",
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1:99",
}


@pytest.fixture
def launched_by(monkeypatch):
    """launched_by(variables): no launcher's variables but these."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({}, ("a:1", 3, 2), ("a:1", 3, 2)),
        ({}, ("a", 3, 2), ("a:8476", 3, 2)),
        ({}, ("[::1]:5", 2, 0), ("[::1]:5", 2, 0)),
        (POD, (None, None, None), ("127.0.0.1:99", 3, 2)),
        (SLURM, (None, None, None), (f"node07:{SLURM_PORT}", 2, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "node7,other[1-3]"}, (None,) * 3, (f"node7:{SLURM_PORT}", 2, 1)),
        (SLURM, (":80", None, None), ("node07:80", 2, 1)),
        (SLURM, ("other:80", 4, 3), ("other:80", 4, 3)),
        (SLURM | OPEN_MPI_4, (None, None, None), (f"10.96.0.1:{OPEN_MPI_PORT}", 4, 3)),  # mpirun in a job
        (
            OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": "0.0;tcp6://[fe80::9,26::3]:4"},
            (None,) * 3,
            ("[fe80::9]:61440", 4, 3),
        ),
        (OPEN_MPI_5, ("a", None, None), ("a:8476", 4, 3)),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (None, None, None), ("127.0.0.1:8476", 4, 3)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("a:80", None, None), ("a:80", 2, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, ("a:80", 4, None), ("a:80", 4, 2)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, (None,) * 3, ("a:8476", 2, 1)),
    ],
)
def test_what_is_not_given_is_found(launched_by, variables, given, expected):
    launched_by(variables)
    assert find_place(*given) == expected


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({}, (None, None, None)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (None, None, None)),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, (None, 1, None)),
        ({"JOB_COMPLETION_INDEX": "0"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, (None, None, None)),
    ],
)
def test_a_host_without_others_is_alone(launched_by, monkeypatch, variables, given):
    launched_by(variables)
    monkeypatch.setattr(start, "_join", lambda *_: pytest.fail("joined"))
    start.start_jax("auto", *given)
    place = find_place(*given)
    if place is None:
        clusters.check_alone()
    assert place is None or place.num_hosts == 1


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        ({}, (None, 4, None), ["where the hosts meet (no variable of a launcher is set); give devices.coord"]),
        ({}, ("a:1", None, None), ["how many hosts there are"]),
        ({}, ("a:b:1", 4, 0), ["devices.coordinator_address: 'a:b:1'; allowed: HOST:PORT"]),
        (SLURM, (None, None, 7), ["devices.host_index: 7 of 2 hosts; allowed: 0 to 1", "SLURM_JOB_ID=12"]),
        (
            {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"},
            (None, None, None),
            ["one host of a Slurm job of 4 tasks", "srun python", "devices.num_hosts 1"],
        ),
        (OPEN_MPI_5, (None, None, None), ["where the hosts meet", "OMPI_COMM_WORLD_RANK=3"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (None, None, None), ["one of 4 processes", "OMPI_COMM_WORLD_SIZE=4"]),
        ({"JOB_COMPLETION_INDEX": "3"}, (None, None, None), ["pod 3 of a Kubernetes Job"]),
    ],
)
def test_a_host_with_others_does_not_train_alone(launched_by, variables, given, words, monkeypatch):
    launched_by(variables)
    # As JAX does where it finds no cluster and has not begun, as it has here.
    error = ValueError("coordinator_address should be defined.")
    monkeypatch.setattr(jax.distributed, "initialize", Mock(side_effect=error))
    with pytest.raises(UserError) as raised:
        start.start_jax("auto", *given)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_of_jax_is_told(launched_by, monkeypatch):
    launched_by({})
    error = RuntimeError("the metadata server is away\nmore")
    monkeypatch.setattr(jax.distributed, "initialize", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"cannot be found \(the metadata server is away; no variable"):
        start.start_jax()


def test_hosts_that_jax_waits_for_in_vain_are_told_in_a_line():
    code = "import time, jax; jax.distributed.initialize = lambda **_: time.sleep(60)\n"
    code += "from largebatch.hosts.start import start_jax; start_jax(join_sec=1)"
    done = run_script("-c", code)
    assert_one_line_error(done, "-c: error: devices.join_sec: after 1 s not all hosts that JAX finds have come (no")


# ---- GPUs and memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([("a", "", 8)], [None]),  # one process per node: all
        ([("a", "", 8), ("b", "", 8)], [None, None]),
        ([("a", "", 8)] * 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([("a", "", 4), ("b", "", 4)] * 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ([("a", "", 8), ("b", "", 4), ("b", "", 4)], [None, [0, 1], [2, 3]]),
        ([("a", "0", 1), ("a", "1", 1)], [None, None]),  # chosen already, by srun --gpus-per-task or a script
        ([("a", "", 0)] * 2, [None, None]),
    ],
)
def test_processes_divide_the_gpus_of_their_machine(hosts, expected):
    hosts = [Here(name, "kernel of " + name, devices, gpus) for name, devices, gpus in hosts]
    assert [share_gpus(hosts, index) for index in range(len(hosts))] == expected


def test_gpus_that_do_not_divide_are_refused_on_all_hosts():
    hosts = [Here("a", "", "", 8)] * 3 + [Here("b", "", "", 8)]
    for index in range(4):
        with pytest.raises(UserError, match=r"^devices: 8 GPUs and 3 processes on a; allowed: a number of"):
            share_gpus(hosts, index)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, 0),  # its part of the node's, as it seems
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "0"}, 0),  # JAX reads it
    ],
)
def test_a_process_counts_the_gpus_that_it_may_take(launched_by, variables, gpus):
    launched_by(variables)
    assert Here.now().gpus == gpus


def test_processes_on_eight_visible_gpus_start_with_their_share():
    """Real processes and JAX itself; the GPUs are only named."""
    code = """
import logging, sys
from largebatch import cli
from largebatch.hosts import memory, start
def main():
    logging.getLogger("jax").setLevel(logging.INFO)
    logging.getLogger("jax").addHandler(logging.StreamHandler(sys.stdout))
    start.start_jax("auto", sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(memory.processes_here)
cli.exit_after(main)
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, f"127.0.0.1:{free_port()}", "2"]
    started = [
        subprocess.Popen([*command, host], env=environment, stdout=-1, stderr=-1, text=True) for host in "01"
    ]
    ended = [process.communicate(timeout=100) for process in started]
    for (stdout, _), gpus in zip(ended, ("0,1,2,3", "4,5,6,7"), strict=True):
        assert f"JAX distributed initialized with visible devices: {gpus}\n" in stdout, ended
        assert stdout.endswith("\n2\n")
    assert [process.returncode for process in started] == [0, 0]


def test_free_memory_is_shared_by_the_processes_of_a_machine(monkeypatch):
    alone = memory.available_bytes()
    monkeypatch.setattr(memory, "processes_here", 3)
    assert memory.available_bytes() == pytest.approx(alone / 3, rel=0.2)

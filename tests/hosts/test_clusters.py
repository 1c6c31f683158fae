"""Where the hosts meet, by what is given and by the variables of launchers; nothing of them runs here."""

import os

import pytest

from largebatch.hosts import clusters, start
from largebatch.hosts.clusters import find_meeting, gpus_of_process
from largebatch.util import UserError

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "MPI_", "TPU_", "JOB_", "JAX_COORD", "LARGEBATCH_", "CUDA_", "KUBERNETES_")
# As a step of `srun --nodes=2 --ntasks-per-node=1` has it on the second node; JAX makes the port of the job.
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
SLURM_PORT = 12 + 65536 - 4096
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
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
        ({"JAX_COORDINATOR_PORT": "7"}, ("a", 3, 2), ("a:7", 3, 2)),
        ({}, ("[::1]:5", 2, 0), ("[::1]:5", 2, 0)),
        (POD, (None, None, None), ("127.0.0.1:99", 3, 2)),
        (SLURM, (None, None, None), (f"node07:{SLURM_PORT}", 2, 1)),
        (SLURM, ("other", None, None), (f"other:{SLURM_PORT}", 2, 1)),
        (SLURM, (":80", None, None), ("node07:80", 2, 1)),
        (SLURM, ("other:80", None, None), ("other:80", 2, 1)),
        (SLURM, ("other:80", 4, 3), ("other:80", 4, 3)),
        (OPEN_MPI_4, (":80", None, None), ("10.96.0.1:80", 4, 3)),
        (OPEN_MPI_5, ("a:80", None, None), ("a:80", 4, 3)),
        (OPEN_MPI_5, ("a", None, None), ("a:8476", 4, 3)),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (None, None, None), ("127.0.0.1:8476", 4, 3)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("a:80", None, None), ("a:80", 2, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, ("a:80", 4, None), ("a:80", 4, 2)),
    ],
)
def test_what_is_not_given_is_found(launched_by, variables, given, expected):
    launched_by(variables)
    meeting = find_meeting(*given, wait_sec=1)
    assert (meeting.address, meeting.num_hosts, meeting.host_index) == expected


def test_what_was_seen_is_told(launched_by):
    launched_by(SLURM)
    seen = "Slurm: SLURM_JOB_ID=12, SLURM_STEP_NODELIST=node[07-08], SLURM_NTASKS=2, SLURM_PROCID=1"
    assert find_meeting(None, None, None, wait_sec=1).seen == seen
    launched_by({"SLURM_STEP_NODELIST": "n" * 5000})
    assert len(clusters.seen()) < 200


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({}, (None, None, None)),
        ({}, (None, 1, None)),
        (SLURM, (None, 1, None)),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, (None, None, None)),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, (None, 1, None)),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, (None, None, None)),
        ({"JOB_COMPLETION_INDEX": "0"}, (None, None, None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, (None, None, None)),
    ],
)
def test_a_host_without_others_is_alone(launched_by, variables, given):
    launched_by(variables)
    assert find_meeting(*given, wait_sec=1) is None


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        ({}, (None, 4, None), ["devices.num_hosts 4: given alone", "no variable of a cluster is set"]),
        ({}, ("a:1", None, None), ["devices.coordinator_address 'a:1': given alone"]),
        ({}, (":1", 4, 0), ["devices.coordinator_address ':1', devices.num_hosts 4, devices.host_index 0: given"]),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, (None, None, None), ["JAX_COORDINATOR_ADDRESS: given alone"]),
        (SLURM, (None, None, 7), ["devices.host_index: 7 of 2 hosts; allowed: 0 to 1", "SLURM_JOB_ID=12"]),
        (
            {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"},
            (None, None, None),
            ["one host of a Slurm job of 4 tasks (SLURM_JOB_ID=12)", "srun python", "devices.num_hosts 1"],
        ),
        ({"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}, (None, None, None), ["Slurm job of 2 tasks"]),
        (OPEN_MPI_5, (None, None, None), ["one of 4 processes", "OMPI_COMM_WORLD_RANK=3", "the machine of rank 0"]),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
            (None,) * 3,
            ["one of 2 hosts of a TPU pod", "jax[tpu]"],
        ),
        ({"PMI_SIZE": "4"}, (None, None, None), ["one of 4 processes (MPI: PMI_SIZE=4)"]),
        ({"JOB_COMPLETION_INDEX": "3"}, (None, None, None), ["pod 3 of a Kubernetes Job"]),
    ],
)
def test_a_host_with_others_does_not_train_alone(launched_by, variables, given, words):
    launched_by(variables)
    with pytest.raises(UserError) as raised:
        find_meeting(*given, wait_sec=1)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_error_of_jax_is_told(launched_by, monkeypatch):
    def fail(*_):
        raise RuntimeError("the metadata server is away\nand more")

    launched_by({})
    monkeypatch.setattr(clusters.distributed.clusters.ClusterEnv, "auto_detect_unset_distributed_params", fail)
    with pytest.raises(UserError, match=r"cannot be found \(the metadata server is away; no variable"):
        find_meeting(None, None, None, wait_sec=1)


# ---- GPUs -------------------------------------------------------------------------------------------

FOUR_A_NODE = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "2", "SLURM_NTASKS": "8"}
UNEVEN = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8,2", "SLURM_LOCALID": "1", "SLURM_NTASKS": "10"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (POD, None),
        (SLURM, None),  # one process per node: all
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}, None),
        (FOUR_A_NODE, [2]),  # as JAX does
        (FOUR_A_NODE | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, [2]),
        (FOUR_A_NODE | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}, [4, 5]),
        (FOUR_A_NODE | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}, None),  # --gpus-per-task=1
        (FOUR_A_NODE | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "16"}, None),  # --gpus-per-task=4
        (UNEVEN, [1]),
        (UNEVEN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [4, 5, 6, 7]),
        (OPEN_MPI_4, [1]),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, None),
        (FOUR_A_NODE | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),  # JAX reads it
    ],
)
def test_a_process_takes_its_share_of_the_gpus(launched_by, variables, expected):
    launched_by(variables)
    assert gpus_of_process() == expected


@pytest.mark.parametrize(("variables", "visible"), [(SLURM, "all"), (FOUR_A_NODE, "2")])
def test_jax_is_told_of_the_gpus(launched_by, monkeypatch, variables, visible):
    """What JAX makes of it: which GPUs it would see, and where it would meet the others."""
    joined, changed = {}, {}

    class Runtime:
        def __init__(self, address, *_, **options):
            joined["address"] = address

        def connect(self):
            joined["visible"] = changed.get("jax_cuda_visible_devices", "all")

    jax_distributed = clusters.distributed
    monkeypatch.setattr(jax_distributed.State, "initialize_preemption_sync_manager", lambda _: None)
    monkeypatch.setattr(jax_distributed, "global_state", jax_distributed.State())
    monkeypatch.setattr(jax_distributed.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax_distributed.config, "update", changed.__setitem__)
    monkeypatch.setattr(jax_distributed._jax, "get_distributed_runtime_client", Runtime)
    monkeypatch.setattr(start, "call_roll", lambda meeting, _: joined.update(hosts=meeting.num_hosts))
    launched_by(variables)
    start._join(find_meeting(None, None, None, wait_sec=1), 1)
    hosts = int(variables["SLURM_NTASKS"])
    assert joined == {"address": f"node07:{SLURM_PORT}", "visible": visible, "hosts": hosts}

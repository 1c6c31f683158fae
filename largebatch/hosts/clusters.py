"""Coordinator of the hosts of a run, from the config, the variables of a launcher, and JAX's detection."""

import dataclasses
import os
import re

from jax._src import distributed

from largebatch.util import UserError

# Set by largebatch.pod for each of its processes, beside JAX's own JAX_COORDINATOR_ADDRESS.
NUM_HOSTS_VARIABLE = "LARGEBATCH_NUM_HOSTS"
HOST_INDEX_VARIABLE = "LARGEBATCH_HOST_INDEX"
DEFAULT_PORT = 8476  # for an address without a port, if no cluster defines one
FIELDS = "devices.coordinator_address, devices.num_hosts and devices.host_index"

# Variables that each launcher sets, for the messages.
VARIABLES = {
    "largebatch.pod": (NUM_HOSTS_VARIABLE, HOST_INDEX_VARIABLE),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
    "a TPU pod": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_COORDINATOR_ADDRESS"),
    "Kubernetes": ("JOB_COMPLETION_INDEX",),
}
LONGEST_VALUE = 60  # most characters of a variable in a message
NOTHING_SEEN = "no variable of a cluster is set"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Coordinator of the hosts, and this host's place among them.

    address: "host:port" of host 0.
    num_hosts, host_index: number of hosts, and index of this host.
    seen: variables that were read, for messages.
    """

    address: str
    num_hosts: int
    host_index: int
    seen: str


def find_meeting(
    address: str | None, num_hosts: int | None, host_index: int | None, wait_sec: float
) -> Meeting | None:
    """Find the coordinator of the hosts; return None if this host is alone.

    Args:
      address: the config's address: "HOST:PORT", or "HOST" or ":PORT" alone.
      num_hosts, host_index: the config's number of hosts and index of this host.
      wait_sec: seconds for which the name of host 0 may be unknown.
    Raises:
      UserError: the config is incomplete, or there are other hosts that JAX does not find.
    """
    given = (address, num_hosts, host_index)
    if num_hosts == 1 and address is None:
        return None  # a request to train on this host alone
    if given == (None, None, None) and NUM_HOSTS_VARIABLE in os.environ:
        num_hosts, host_index = (int(os.environ[name]) for name in (NUM_HOSTS_VARIABLE, HOST_INDEX_VARIABLE))
    host, port = _split(address or os.environ.get("JAX_COORDINATOR_ADDRESS", ""))
    ranks = _mpi_ranks()
    if ranks and num_hosts is None:
        num_hosts = ranks.size
    if ranks and host_index is None:
        host_index = ranks.rank
    if ranks and not host and ranks.on_one_machine:
        host = "127.0.0.1"
    if num_hosts is not None and host_index is None and "JOB_COMPLETION_INDEX" in os.environ:
        host_index = int(os.environ["JOB_COMPLETION_INDEX"])
    problem, says = "", seen()
    if not (host and port) or num_hosts is None or host_index is None:
        found, problem = _found_by_jax(num_hosts, host_index, wait_sec)
        if found is not None:
            found_host, found_port = _split(found[0])
            host, port = host or found_host, port or found_port
            num_hosts, host_index = found[1], found[2]
            says = says if says != NOTHING_SEEN else "what JAX finds on a TPU VM"
    if host and num_hosts is not None and host_index is not None:
        port = port or os.environ.get("JAX_COORDINATOR_PORT") or str(DEFAULT_PORT)
        return _checked(Meeting(f"{host}:{port}", num_hosts, host_index, says))
    if given == (None, None, None) and not os.environ.get("JAX_COORDINATOR_ADDRESS"):
        _check_that_host_is_alone(problem)
        return None
    raise UserError(_incomplete(given, problem))


def gpus_of_process() -> list[int] | None:
    """Return the numbers of the GPUs of this host that this process takes; None for all that it sees.

    JAX would give every process of Slurm and Open MPI one GPU: with one process per node all others would idle.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None  # JAX reads the variable
    place = _place_on_machine()
    if place is None or place[1] == 1:
        return None
    rank, processes = place
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len([name for name in visible.split(",") if name]) if visible else None
    if count is None:
        return [rank]
    on_machine = int(os.environ.get("SLURM_GPUS_ON_NODE") or count)
    if count < max(processes, on_machine):
        return None  # the scheduler has already chosen the GPUs of this process
    each = count // processes
    return list(range(rank * each, (rank + 1) * each))


def seen() -> str:
    """Return the launchers whose variables are set here, as "Slurm: SLURM_JOB_ID=7, SLURM_NTASKS=2"."""
    parts = []
    for launcher, names in VARIABLES.items():
        values = [f"{name}={os.environ[name][:LONGEST_VALUE]}" for name in names if name in os.environ]
        if values:
            parts.append(f"{launcher}: {', '.join(values)}")
    return "; ".join(parts) or NOTHING_SEEN


# ---- launchers --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ranks:
    size: int
    rank: int
    on_one_machine: bool


def _mpi_ranks() -> _Ranks | None:
    """Return the ranks of an MPI that JAX does not recognise, such as Open MPI 5 or MPICH; None without one."""
    if "OMPI_MCA_orte_hnp_uri" in os.environ:  # Open MPI 4, which JAX knows
        return None
    for size, rank, local in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ):
        if size in os.environ and rank in os.environ and int(os.environ[size]) > 1:
            same = os.environ.get(local) == os.environ[size]
            return _Ranks(int(os.environ[size]), int(os.environ[rank]), same)
    return None


def _place_on_machine() -> tuple[int, int] | None:
    """Return this process's rank on its machine and the number of processes there; None without a launcher."""
    env = os.environ
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:
        return int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if "SLURM_STEP_NODELIST" in env and "SLURM_LOCALID" in env:
        per_node = []  # "8(x2),4": 8, 8 and 4 processes
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
            per_node += [int(count)] * int(times or 1)
        node = int(env.get("SLURM_NODEID", 0))
        if node < len(per_node):
            return int(env["SLURM_LOCALID"]), per_node[node]
    return None


def _found_by_jax(
    num_hosts: int | None, host_index: int | None, wait_sec: float
) -> tuple[tuple[str, int, int] | None, str]:
    """Return what JAX detects on TPU pods, Slurm, Open MPI 4 and Kubernetes, or None and the reason.

    The address is detected even if it is given: an address without a port takes the detected one.
    """
    find = distributed.clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, num_hosts, host_index, _ = find(None, num_hosts, host_index, None, None, int(wait_sec))
    except Exception as error:  # metadata servers, Kubernetes' client, missing variables: the caller reports it
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    if address is None or num_hosts is None or host_index is None:
        return None, ""
    return (address, num_hosts, host_index), ""


# ---- checks -----------------------------------------------------------------------------------------


def _split(address: str) -> tuple[str, str]:
    """Split "HOST:PORT", "HOST" or ":PORT" into (HOST, PORT), with "" for a missing part."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", address)
    if found is None:
        raise UserError(f"devices.coordinator_address: {address!r}; allowed: HOST:PORT, HOST or :PORT")
    return found[1], found[2] or ""


def _checked(meeting: Meeting) -> Meeting:
    if not 0 <= meeting.host_index < meeting.num_hosts:
        raise UserError(
            f"devices.host_index: {meeting.host_index} of {meeting.num_hosts} hosts; allowed: 0 to "
            f"{meeting.num_hosts - 1} (seen here: {meeting.seen})"
        )
    return meeting


def _incomplete(given: tuple, problem: str) -> str:
    names = ("devices.coordinator_address", "devices.num_hosts", "devices.host_index")
    fields = ", ".join(f"{name} {value!r}" for name, value in zip(names, given, strict=True) if value is not None)
    return (
        f"{fields or 'JAX_COORDINATOR_ADDRESS'}: given alone, and no cluster here knows the rest "
        f"({problem or seen()}); allowed: all of {FIELDS}, or a part on TPU pods, Slurm, Open MPI and Kubernetes"
    )


def _check_that_host_is_alone(problem: str) -> None:
    """Raise UserError if there are other hosts, which would each train alone, into the same folder."""
    env = os.environ
    alone = "to train on this host alone give devices.num_hosts 1"
    processes = max(int(env.get(name) or 1) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if processes > 1:
        raise UserError(
            f"devices: started as one of {processes} processes ({seen()}), and nothing says where they meet"
            f"{f' ({problem})' if problem else ''}; give devices.coordinator_address, the machine of rank 0"
        )
    if problem:
        raise UserError(f"devices: the other hosts cannot be found ({problem}; {seen()}); give {FIELDS}")
    tasks = max(int(env.get(name) or 1) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    if "SLURM_JOB_ID" in env and "SLURM_STEP_NODELIST" not in env and tasks > 1:
        raise UserError(
            f"devices: started on one host of a Slurm job of {tasks} tasks (SLURM_JOB_ID={env['SLURM_JOB_ID']}), "
            f"without srun; start it by `srun python ...`; {alone}"
        )
    workers = env.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(workers) > 1:
        raise UserError(
            f"devices: this is one of {len(workers)} hosts of a TPU pod ({seen()}), and JAX finds no TPU; "
            f'install "jax[tpu]"; {alone}'
        )
    if int(env.get("JOB_COMPLETION_INDEX") or 0) > 0:
        raise UserError(
            f"devices: this is pod {env['JOB_COMPLETION_INDEX']} of a Kubernetes Job (JOB_COMPLETION_INDEX), and "
            f"nothing says where its pods meet; give devices.coordinator_address and devices.num_hosts; {alone}"
        )

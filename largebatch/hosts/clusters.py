"""Place of this host among others, by the config or the variables of a launcher, and its share of the GPUs."""

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from largebatch.util import UserError

# Set by largebatch.pod for each of its processes, beside JAX's own JAX_COORDINATOR_ADDRESS.
NUM_HOSTS_VARIABLE = "LARGEBATCH_NUM_HOSTS"
HOST_INDEX_VARIABLE = "LARGEBATCH_HOST_INDEX"
SLURM_STEP = "SLURM_STEP_NODELIST"  # set by srun, but not in the script of a job
# Number of processes, index of this one, and number on this machine, by launcher.
LAUNCHERS = (
    (NUM_HOSTS_VARIABLE, HOST_INDEX_VARIABLE, ""),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_NTASKS", "SLURM_PROCID", ""),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)
OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"  # address of mpirun, in Open MPI 4
SEEN = (*(name for names in LAUNCHERS for name in names[:2]), "SLURM_JOB_ID", SLURM_STEP, "TPU_WORKER_HOSTNAMES")
LONGEST_VALUE = 60  # most characters of a variable in a message
DEFAULT_PORT = 8476
FIRST_JOB_PORT, JOB_PORTS = 61440, 4096  # as in JAX: jobs that share a machine need ports of their own
FIELDS = "devices.coordinator_address, devices.num_hosts and devices.host_index"


class Place(NamedTuple):
    """Place of this host among the hosts of a run."""

    address: str  # "HOST:PORT" of host 0
    num_hosts: int
    host_index: int


class Here(NamedTuple):
    """Description of a process for the others."""

    name: str  # of the host
    machine: str  # identifier of its running kernel, which containers share
    devices: str  # CUDA_VISIBLE_DEVICES
    gpus: int  # number of GPUs that the process may take, if it is alone on its host

    @classmethod
    def now(cls) -> "Here":
        """Describe this process."""
        boot, drivers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/driver/nvidia/gpus")
        machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = len(devices.split(",")) if devices else len(list(drivers.glob("*")))
        # Where a scheduler gave this process a part of the node's GPUs, it sees no others.
        is_part = gpus < int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) or "JAX_LOCAL_DEVICE_IDS" in os.environ
        return cls(socket.gethostname(), machine, devices, 0 if is_part else gpus)


def share_gpus(hosts: list[Here], host_index: int) -> list[int] | None:
    """Divide the GPUs of each machine among its processes.

    JAX would give every process of Slurm and Open MPI one GPU: others would idle.

    Args:
      hosts: all processes of the run.
      host_index: index of this one.
    Returns:
      The numbers of this process's GPUs, of those that it sees; None for all of them.
    Raises:
      UserError: the GPUs of any machine do not divide among its processes; the same on every host.
    """
    for here in hosts:
        if here.gpus % hosts.count(here):
            raise UserError(
                f"devices: {here.gpus} GPUs and {hosts.count(here)} processes on {here.name}; allowed: a number of "
                "processes that divides the GPUs, or CUDA_VISIBLE_DEVICES set for each"
            )
    here = hosts[host_index]
    each = here.gpus // hosts.count(here)
    first = each * hosts[:host_index].count(here)
    return list(range(first, first + each)) if 0 < each < here.gpus else None


def find_place(address: str | None, num_hosts: int | None, host_index: int | None) -> Place | None:
    """Find the place of this host; return None if neither the config nor a launcher's variable names one.

    Args:
      address: "HOST:PORT" of host 0, or "HOST" or ":PORT" alone.
      num_hosts, host_index: number of hosts, and index of this host.
    Raises:
      UserError: a part is given or found, and nothing here knows the rest.
    """
    found_hosts, found_index, found_address = _launched()
    num_hosts = found_hosts if num_hosts is None else num_hosts
    if num_hosts == 1:
        return Place("", 1, 0)
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if num_hosts is None and host_index is None and not address:
        return None
    host_index = found_index if host_index is None else host_index
    (host, port), (found_host, found_port) = _split(address), _split(found_address)
    host = host or found_host
    port = port or os.environ.get("JAX_COORDINATOR_PORT") or found_port or DEFAULT_PORT
    if not host or num_hosts is None or host_index is None:
        unknown = "how many hosts there are, or which one this is" if host else "where the hosts meet"
        raise UserError(
            f"devices: nothing says {unknown} ({seen()}); give {FIELDS}; "
            "allowed: a part of them under srun, mpirun and in a Kubernetes Job"
        )
    if not 0 <= host_index < num_hosts:
        raise UserError(
            f"devices.host_index: {host_index} of {num_hosts} hosts; allowed: 0 to {num_hosts - 1} ({seen()})"
        )
    return Place(f"{host}:{port}", num_hosts, host_index)


def seen() -> str:
    """Return the variables of launchers that are set here, as "SLURM_NTASKS=2, SLURM_PROCID=0"."""
    found = [f"{name}={os.environ[name][:LONGEST_VALUE]}" for name in SEEN if name in os.environ]
    return f"seen here: {', '.join(found)}" if found else "no variable of a launcher is set"


def check_alone() -> None:
    """Refuse to train alone on one of several hosts, which would all write into the same folder.

    Raises:
      UserError: variables tell of other hosts, which nobody found.
    """
    env = os.environ
    tasks = max(int(env.get(name) or 1) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    processes = max(int(env.get(name) or 1) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if processes > 1:
        others = f"one of {processes} processes, and nothing says which one ({seen()}); give {FIELDS}"
    elif "SLURM_JOB_ID" in env and SLURM_STEP not in env and tasks > 1:
        others = f"one host of a Slurm job of {tasks} tasks, started without srun; start it by `srun python ...`"
    elif int(env.get("JOB_COMPLETION_INDEX") or 0) > 0:
        others = f"pod {env['JOB_COMPLETION_INDEX']} of a Kubernetes Job; give {FIELDS.replace(' and ', ' or ')}"
    else:
        return
    raise UserError(f"devices: this is {others}; to train on this host alone give devices.num_hosts 1")


def _launched() -> tuple[int | None, int | None, str]:
    """Return the number of hosts, the index of this one, and host 0's "HOST:PORT", "HOST" or "", by variables."""
    env = os.environ
    names = env.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(names) > 1 and "MEGASCALE_COORDINATOR_ADDRESS" not in env:
        return len(names), int(env["TPU_WORKER_ID"]), names[0]
    for size, index, local_size in LAUNCHERS:
        if size not in env or index not in env or (size == "SLURM_NTASKS" and SLURM_STEP not in env):
            continue
        address = ""
        if env.get(local_size) == env[size]:
            address = "127.0.0.1"
        elif size == "SLURM_NTASKS":
            name, number = re.match(r"([^\[,]+)(?:\[(\d+))?", env[SLURM_STEP]).groups("")  # node[07-08],other
            address = f"{name}{number}:{FIRST_JOB_PORT + int(env['SLURM_JOB_ID']) % JOB_PORTS}"
        elif size == "OMPI_COMM_WORLD_SIZE" and OPEN_MPI_URI in env:
            job, _, uri = env[OPEN_MPI_URI].partition(".")  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
            host = re.search(r"tcp://([^,:]+)", uri) or re.search(r"tcp6://(\[[^,\]]+)", uri)
            closed = "]" if host[1].startswith("[") else ""
            address = f"{host[1]}{closed}:{FIRST_JOB_PORT + int(job) // JOB_PORTS % JOB_PORTS}"
        return int(env[size]), int(env[index]), address
    return None, int(env["JOB_COMPLETION_INDEX"]) if "JOB_COMPLETION_INDEX" in env else None, ""


def _split(address: str) -> tuple[str, str]:
    """Split "HOST:PORT", "HOST" or ":PORT" into (HOST, PORT), with "" for a missing part."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", address)
    if found is None:
        raise UserError(f"devices.coordinator_address: {address!r}; allowed: HOST:PORT, HOST or :PORT")
    return found[1], found[2] or ""

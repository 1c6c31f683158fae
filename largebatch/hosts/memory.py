"""Memory of the devices: free and peak bytes."""

import mmap
from pathlib import Path

import jax
import numpy as np

from largebatch.hosts import collectives

processes_here = 1  # number of processes of the run on this machine, which share its memory; set at the start


def aligned_empty(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Allocate an uninitialised array on a page boundary, which a CPU device takes over without a copy.

    Its pages are small. NumPy requests huge pages, which take five times as long on a virtual machine (LOG.md).
    """
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, num_bytes).view(dtype).reshape(shape)


def available_bytes() -> int | None:
    """Return the free bytes of each local device, or None if the platform does not report them."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if jax.default_backend() == "cpu" and meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        devices_of_machine = jax.local_device_count() * processes_here
        return int(fields["MemAvailable"].split()[0]) * 1024 // devices_of_machine
    return None


def peak_bytes() -> int | None:
    """Return the peak bytes in use on a device of this host; None if the platform does not report them."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return None if None in peaks else max(peaks)


def largest_peak_bytes() -> int | None:
    """Return the largest `peak_bytes` of all hosts; None if one of them does not know it. Collective."""
    by_host = collectives.gather_json(peak_bytes())
    return None if None in by_host else max(by_host)


def least_available_bytes() -> int | None:
    """Return the least `available_bytes` of all hosts; None if one of them does not know it. Collective."""
    by_host = collectives.gather_json(available_bytes())
    return None if None in by_host else min(by_host)

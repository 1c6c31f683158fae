"""What a data set will take, told before its cache is built."""

from largebatch.cache.estimate import BuildEstimate
from largebatch.doctor.findings import FAIL, OK, WARN, Finding, duration
from largebatch.hosts import memory
from largebatch.training.setup import Setup


def check_build(estimate: BuildEstimate) -> Finding:
    """Disk and time that building the cache takes."""
    height, width, channels = estimate.layout.image_shape
    text = (
        f"{estimate.num_images:,} images of {height}x{width}x{channels} {estimate.layout.dtype}: "
        f"{estimate.disk_bytes / 1e9:,.2f} GB on disk, about {duration(estimate.seconds)} to build, at "
        f"{estimate.images_per_sec:,.0f} images/s on this host ({estimate.sampled:,} were decoded for this)"
    )
    free = estimate.free_disk_bytes
    if free is None:
        return Finding(WARN, "cache", text, "how much room the bucket of augment.cache_dir has is not known")
    text += f"; {free / 1e9:,.2f} GB free"
    if estimate.disk_bytes > free:
        return Finding(
            FAIL, "cache", text, "give an augment.cache_dir with more room, or a smaller dataset.image_size"
        )
    return Finding(OK, "cache", text)


def check_storage(setup: Setup, needed: dict[str, int]) -> Finding:
    """Where the training images will be, and what a device needs; a set that does not fit was refused before.

    Args:
      needed: bytes on a device, by part.
    """
    parts = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in needed.items())
    text = f"augment.storage {setup.program.storage}: {sum(needed.values()) / 1e6:,.0f} MB a device ({parts})"
    free = memory.available_bytes()
    if free is None:
        return Finding(WARN, "storage", text, "this platform does not tell how much memory there is")
    return Finding(OK, "storage", f"{text}; {free / 1e6:,.0f} MB free now")

"""Where the training images of a run are (augment.storage), by what fits on a device."""

import logging
from collections.abc import Callable

from largebatch.data import streaming
from largebatch.data.placement import BUFFERS
from largebatch.errors import BadSetting
from largebatch.hosts import memory
from largebatch.training.setup import Setup

log = logging.getLogger("largebatch")

STORAGES = ("expanded", "on_device", "streamed")  # each needs less memory than the one before


def storages_to_try(wanted: str, *, packed: bool) -> list[str]:
    """What augment.storage `wanted` allows.

    Raises:
      BadSetting: a stream, where each device has a run of its own and so needs all images.
    """
    if packed and wanted == "streamed":
        raise BadSetting(
            "augment.storage: 'streamed'; allowed: auto | expanded | on_device with --pack, "
            "for each of its runs is one device's and needs all images there"
        )
    if wanted != "auto":
        return [wanted]
    return [storage for storage in STORAGES if not (packed and storage == "streamed")]


def setup_that_fits(storages: list[str], resolve: Callable[[str], Setup], needed: Callable[[Setup], dict]) -> Setup:
    """The setup with the first of `storages` that fits on a device of every host; called by all hosts together.

    Where a platform does not tell what is free, the first is taken.

    Args:
      resolve: makes the setup with a storage.
      needed: bytes per device by part.
    Raises:
      BadSetting: not even the last one fits.
    """
    free, compared = memory.least_available_bytes(), []
    for storage in storages:
        setup = resolve(storage)
        sizes = needed(setup)
        compared.append(f"{storage} needs {sum(sizes.values()) / 1e6:,.1f} MB a device")
        if free is None or sum(sizes.values()) <= free:
            break
    memory.check_fits(sizes, free, _hint(setup, sizes))
    if len(storages) > 1:
        told = "this platform does not tell how much is free" if free is None else f"{free / 1e6:,.1f} MB are free"
        log.info("augment.storage: auto takes %s: %s, %s", setup.program.storage, ", ".join(compared), told)
    return setup


def _hint(setup: Setup, sizes: dict[str, int]) -> str:
    """What helps where images do not fit; `sizes` are what they need, by part."""
    program = setup.program
    if program.packed:
        return "without --pack devices share the images"
    if program.storage == "expanded":
        return "augment.storage 'on_device' or 'streamed' needs less, and so does each of more devices"
    if program.storage == "on_device":
        return "augment.storage 'streamed' needs less, and so does each of more devices"
    if sizes[BUFFERS] > 2 * streaming.BUFFER_BYTES:
        return "a buffer holds all that a device needs for one update: a smaller batch.size, or more devices"
    return "a smaller batch.micro_batch_size needs less"

"""What a run is set up to do: all that follows from its config, resolved once."""

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
from flax import linen as nn

from largebatch.cache.cache import Cache, RowLayout
from largebatch.data import batching, streaming
from largebatch.data.batching import DataSharding, Grouping
from largebatch.data.placement import BUFFERS
from largebatch.data.random_augment import RandomAugment
from largebatch.errors import BadSetting
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory
from largebatch.optim.batch_sizes import resolve_batch_size
from largebatch.optim.noise_scale import NoisePlan
from largebatch.optim.optimizers import Hyperparams, OptimizerOptions
from largebatch.optim.piecewise import PiecewiseConstant
from largebatch.optim.schedules import Schedule, make_schedule
from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.tasks.task import Task
from largebatch.training.local_sgd import Sync

log = logging.getLogger("largebatch")

STORAGES = ("expanded", "on_device", "streamed")  # each needs less memory than the one before
MOST_SHARDS_PER_ORIGINAL = 4  # more would mostly be empty


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """The properties of a data set on which a run's Setup depends."""

    num_originals: int  # training images of all hosts, before they are expanded to their views
    layout: RowLayout  # of the originals
    num_classes: int
    mean: tuple[float, ...]  # of the training images, by channel
    std: tuple[float, ...]
    targets: PixelTargets = NO_TARGETS  # which the last channels that are stored hold

    @classmethod
    def of(cls, cache: Cache) -> "DataFacts":
        """The properties of the data set in `cache`."""
        channels = cache.image_shape[-1] - cache.targets.planes
        mean, std = (tuple(cache.manifest[name][:channels]) for name in ("mean", "std"))
        return cls(cache.count("train"), cache.layout, len(cache.class_names), mean, std, cache.targets)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        height, width, channels = self.layout.image_shape
        return height, width, channels - self.targets.planes


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """All that shapes the compiled programs. Runs that agree in it share them."""

    dataset: str  # see `dataset_key`
    image_shape: tuple[int, int, int]  # height, width and channels that the network sees
    mean: tuple[float, ...]  # of the training images, by channel
    std: tuple[float, ...]
    storage: str  # augment.storage, where the config says "auto" what was chosen
    buffer_rows: int | None  # originals in a device's buffer; None where nothing is streamed
    random_augment: RandomAugment
    sharding: DataSharding
    network: nn.Module  # of the config's group `model`
    optimizer: str  # optimizer.name
    optimizer_options: OptimizerOptions
    task: Task
    statistics_decay: float  # model.norm_decay
    ema_decay: float | None  # train.ema_decay
    noise: NoisePlan | None  # how the gradient's noise is measured; None where it is not
    adascale_reference: int | None  # schedule.reference_batch_size; None without AdaScale
    rate_table_length: int | None  # see schedules.UpdateInputs; None without AdaScale
    sync_mode: str  # sync.mode
    sync_policy: str  # sync.optimizer_state
    max_nonfinite: int  # train.max_nonfinite, 0 where the run does not skip updates
    view_average: bool  # eval.view_average
    shift_average: int  # eval.shift_average, in pixels
    grouping: Grouping  # of a device's part of a batch
    single_micro_batch: bool  # see `grouping.has_one_micro_batch`
    by_slices: bool  # see `grouping.reads_slices`
    prediction_micro_batch_size: int  # images that one device predicts at once
    inputs_length: int  # updates that one call can do; a power of two, so that runs of other inner_steps share them

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image as it is stored, with what is to be predicted of it."""
        height, width, channels = self.image_shape
        return height, width, channels + self.task.target_planes

    @property
    def stored_views(self) -> int:
        """Views of an original that devices hold; the others are made when they are read."""
        return self.sharding.views if self.storage == "expanded" else 1

    def is_placed_as(self, other: "ProgramOptions") -> bool:
        """Whether the data that one has on the devices serve the other."""
        return (self.dataset, self.storage, self.buffer_rows) == (other.dataset, other.storage, other.buffer_rows)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that follows from a config, the data set's size and the number of devices; resolved once."""

    config: object  # the ConfigDict that it was made from
    hardware: Hardware  # that it was made for
    schedule: Schedule
    program: ProgramOptions
    hyperparams: Hyperparams
    sync: Sync
    first_local_step: int | None  # the update from which devices take local steps; None where they never do
    batch_sizes: tuple[int, ...]  # all that the run may come to, ascending

    @property
    def num_examples(self) -> int:
        """Examples in an epoch: the views of all training images."""
        return self.program.sharding.num_examples

    @property
    def num_devices(self) -> int:
        """Devices that share a batch."""
        return self.program.sharding.num_devices

    @property
    def micro_batch_size(self) -> int:
        """Examples per gradient evaluation of one device."""
        return self.program.grouping.micro_batch_size

    def with_batch_sizes(self, batch_sizes: PiecewiseConstant) -> "Setup":
        """The same run with the batch sizes that training has come to."""
        schedule = make_schedule(self.config, self.num_examples, batch_sizes)
        return dataclasses.replace(self, schedule=schedule)


# ---- the batch sizes of a run ------------------------------------------------------


def choose_sharding(virtual_shards: int | None, num_originals: int, num_devices: int, views: int) -> DataSharding:
    """How the training set is dealt to virtual shards and devices.

    Args:
      virtual_shards: a config's batch.virtual_shards; None chooses by `num_originals`.
    Raises:
      BadSetting: there are fewer shards than devices, or far more than originals.
    """
    num_shards = virtual_shards or batching.choose_num_shards(num_originals)
    most = max(MOST_SHARDS_PER_ORIGINAL * num_originals, batching.SHARD_COUNTS[0])
    found = f"{num_originals} training images on {num_devices} devices"
    if num_devices > most:
        raise BadSetting(f"dataset: {found}; allowed: up to {most} devices")
    if not num_devices <= num_shards <= most:
        chosen = "" if virtual_shards else " by itself"
        raise BadSetting(
            f"batch.virtual_shards: {num_shards}{chosen} for {found}; "
            f"allowed: an integer from {num_devices} to {most}"
        )
    return DataSharding(num_originals, num_shards, num_devices, views)


def possible_batch_sizes(fields, schedule: Schedule) -> np.ndarray:
    """All batch sizes that a run may come to, int64, ascending.

    Args:
      fields: a config's `batch`.
      schedule: as it is when the run starts.
    Raises:
      BadSetting: with batch.auto, the largest is below the smallest.
    """
    if not fields.auto:
        sizes = schedule.batch_sizes
        # With AdaScale a run may have more updates than its schedule has scale-invariant steps.
        return np.unique(sizes.values if schedule.scale_invariant else sizes.first(schedule.num_updates).values)
    smallest = schedule.max_batch_size
    largest = resolve_batch_size(fields.max_size, schedule.examples_per_epoch, field="batch.max_size")
    if largest < smallest:
        raise BadSetting(f"batch.max_size: {largest}; allowed: at least batch.size, {smallest}")
    doublings = smallest * 2 ** np.arange((largest // smallest).bit_length())
    return np.unique([*doublings, largest])


# ---- where the training images are --------------------------------------------------------------------


def setup_that_fits(
    storages: list[str], resolve: Callable[[str], Setup], needed: Callable[[Setup], dict], free: int | None
) -> Setup:
    """The setup with the first of `storages` that fits on a device.

    Args:
      resolve: makes the setup with a storage.
      needed: bytes per device by part.
      free: bytes on a device; where that is not known, the first storage is taken.
    Raises:
      BadSetting: not even the last one fits.
    """
    compared = []
    for storage in storages:
        setup = resolve(storage)
        sizes = needed(setup)
        compared.append(f"{storage} needs {sum(sizes.values()) / 1e6:,.1f} MB a device")
        if free is None or sum(sizes.values()) <= free:
            break
    memory.check_fits(sizes, free, lambda: _hint(setup, sizes))
    if len(storages) > 1:
        told = "this platform does not tell how much is free" if free is None else f"{free / 1e6:,.1f} MB are free"
        log.info("augment.storage: auto takes %s: %s, %s", setup.program.storage, ", ".join(compared), told)
    return setup


def _hint(setup: Setup, sizes: dict[str, int]) -> str:
    """Return what a user can change where images do not fit; `sizes` are the bytes they need, by part."""
    program = setup.program
    if program.storage != "streamed":
        smaller = "'on_device' or 'streamed'" if program.stored_views > 1 else "'streamed'"
        return f"augment.storage {smaller} needs less, and so does each of more devices"
    if sizes[BUFFERS] > 2 * streaming.BUFFER_BYTES:
        return "a buffer holds all that a device needs for one update: a smaller batch.size, or more devices"
    return "a smaller batch.micro_batch_size needs less"

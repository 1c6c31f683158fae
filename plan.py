"""The plan of a run: Config + data set + devices -> RunPlan.

A `RunPlan` has everything that is decided before the first step; `build` makes its programs.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Hashable

import jax
import numpy as np
from flax import linen as nn

import augment
import model as models
from largebatch.config.dicts import RULES, flatten
from largebatch.config.fields import Config
from largebatch.config.rules import MODEL_OPTIONS, length_problems
from largebatch.data import streaming
from largebatch.data.batching import DataSharding, Grouping, choose_sharding
from largebatch.data.cache import DatasetInfo
from largebatch.data.placement import BUFFERS, bytes_per_device
from largebatch.data.random_augment import RandomAugment
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory
from largebatch.optim.batch_schedule import BatchSchedule, possible_batch_sizes, resolve_batch_size
from largebatch.optim.optimizers import CODE_FIELDS, Hyperparams, create_optimizer
from largebatch.optim.schedules import Schedule, create_schedule
from largebatch.tasks.task import Task, make_task
from largebatch.training.costs import bytes_beside_images, training_costs
from largebatch.training.grouping import MicroBatchPlan, plan_micro_batches
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.views import STORAGES
from largebatch.util import BadSetting

log = logging.getLogger("largebatch")


# ---- the plan -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class RunPlan:
    """Everything that is decided before the first step.

    Attributes:
      schedule: as the run starts; where the batch grows, later ones are made by its `with_batch_sizes`.
      batch_sizes: all batch sizes that the run may come to, ascending.
      storage: augment.storage, and what was chosen where the config says "auto".
      buffer_rows: images in a device's buffer; None where nothing is streamed.
    """

    config: Config
    hardware: Hardware
    data: DatasetInfo
    storage: str
    sharding: DataSharding
    schedule: Schedule
    batch_sizes: tuple[int, ...]
    task: Task
    network: nn.Module
    micro_batches: MicroBatchPlan
    buffer_rows: int | None

    @property
    def grouping(self) -> Grouping:
        """Micro-batches and ghost batches of a device's part of a batch."""
        return self.micro_batches.grouping

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        return self.data.image_shape

    @property
    def num_devices(self) -> int:
        """Devices that share a batch."""
        return self.sharding.num_devices

    @property
    def num_examples(self) -> int:
        """Examples in an epoch: the views of all training images."""
        return self.sharding.num_examples

    @property
    def micro_batch_size(self) -> int:
        """Examples per gradient evaluation of one device."""
        return self.grouping.micro_batch_size

    @property
    def stored_views(self) -> int:
        """Views of an image that devices hold; the others are made when they are read."""
        return self.sharding.views if self.storage == "expanded" else 1

    @property
    def first_local_step(self) -> int | None:
        """The step from which devices take local steps; None where they never do."""
        return None if self.config.sync.mode == "every_step" else self.config.sync.start_step

    @property
    def max_nonfinite(self) -> int:
        """Maximum number of consecutive non-finite steps, which are skipped."""
        return self.config.train.max_nonfinite if self.config.train.on_nonfinite == "skip" else 0

    @property
    def inputs_length(self) -> int:
        """Steps that one call can do: a power of two, so that runs of other inner_steps share programs."""
        return 1 << (self.config.train.inner_steps - 1).bit_length()

    @property
    def data_key(self) -> Hashable:
        """Key of the data on the devices; plans of equal keys share them."""
        return data_fields(self.config), self.storage, self.buffer_rows

    @property
    def program_key(self) -> Hashable:
        """Key of all that shapes the compiled programs, which plans of equal keys share; rates and seeds do not."""
        config, is_adascale = self.config, self.schedule.scale_invariant
        return (
            self.data_key,
            (self.image_shape, self.data.mean, self.data.std, self.sharding),
            (self.network, self.task, self.micro_batches, self.inputs_length, self.max_nonfinite),
            RandomAugment.from_config(config.augment, self.data.mean),
            tuple(getattr(config.optimizer, name) for name in CODE_FIELDS),
            (config.model.norm_decay, config.train.ema_decay, config.eval),
            (config.schedule.reference_batch_size, len(self.schedule.rate_table)) if is_adascale else None,
            (config.sync.mode, config.sync.optimizer_state),
        )


def data_fields(config: Config) -> str:
    """Return the fields that decide which data are on the devices, as one string."""
    values = flatten(dataclasses.asdict(config))
    return json.dumps({name: values[name] for name, rule in RULES.items() if rule.data})


def plan_run(config: Config, data: DatasetInfo, hardware: Hardware, storage: str | None = None) -> RunPlan:
    """Decide everything before the first step.

    Args:
      storage: in place of augment.storage where that is "auto".
    Raises:
      BadSetting: the config does not go with the data set or the devices.
    """
    config = with_inner_steps(config, data)
    views, storage = augment.VIEW_COUNTS[config.augment.views], storage or config.augment.storage
    sharding = choose_sharding(config.batch.virtual_shards, data.num_images, hardware.num_devices, views)
    batch_sizes = BatchSchedule.from_config(config.batch, sharding.num_examples, hardware.num_devices)
    num_steps, optimizer = config.train.inner_steps * config.train.outer_steps, config.optimizer
    schedule = create_schedule(
        config.schedule, optimizer.learning_rate, num_steps, batch_sizes, sharding.num_examples, optimizer.b2
    )
    if config.sync.start_step >= schedule.num_steps:  # growing batches leave fewer steps
        raise BadSetting(f"sync.start_step: {config.sync.start_step}; allowed: up to {schedule.num_steps - 1}")
    sizes = possible_batch_sizes(config.batch, schedule)
    task = make_task(config.task, data.num_classes, data.targets, config.train.label_smoothing)
    network = make_network(config, task, hardware.platform)
    micro_batches = plan_micro_batches(
        sizes,
        sharding,
        hardware,
        lambda: training_costs(network, data.image_shape).activation_bytes,
        batch=config.batch,
        model=config.model,
        schedule=config.schedule,
        log=config.log,
        in_any_order=storage == "expanded" and takes_whole_set(config, sharding.num_examples),
    )
    # The doctor takes one micro-batch per device.
    largest = max(int(sizes[-1]), micro_batches.grouping.micro_batch_size * hardware.num_devices)
    stream_rows = streaming.buffer_rows(sharding, data.layout.row_bytes, largest)
    return RunPlan(
        config=config,
        hardware=hardware,
        data=data,
        storage=storage,
        sharding=sharding,
        schedule=schedule,
        batch_sizes=tuple(sizes.tolist()),
        task=task,
        network=network,
        micro_batches=micro_batches,
        buffer_rows=stream_rows if storage == "streamed" else None,
    )


def with_inner_steps(config: Config, data: DatasetInfo) -> Config:
    """Check that a config goes with its data, and give it a number of steps where train.inner_steps is "pass".

    Raises:
      BadSetting: the config does not go with the data, or with that number of steps.
    """
    augment.check_data(config, data.image_shape, data.targets, f"dataset {config.dataset.name!r}")
    if config.train.inner_steps != "pass":
        return config
    num_examples = data.num_images * augment.VIEW_COUNTS[config.augment.views]
    batch_size = resolve_batch_size(config.batch.size, num_examples)
    config = config.replace(train={"inner_steps": -(-data.num_images // batch_size)})
    if problems := list(length_problems(config)):
        raise BadSetting("; ".join(problems))
    return config


def takes_whole_set(config: Config, num_examples: int) -> bool:
    """Tell whether every step of a run takes every example once, as it is."""
    batch, is_changed = config.batch, RandomAugment.from_config(config.augment, ()).is_on
    batch_changes = batch.auto or batch.trace is not None or batch.per_device_batch_size
    if is_changed or batch_changes or config.schedule.decay_by != "rate":
        return False
    return resolve_batch_size(batch.size, num_examples) == num_examples


def make_network(config: Config, task: Task, platform: str) -> nn.Module:
    """Make the network of a config for its task, as it is computed on a platform."""
    given = {name: getattr(config.model, name) for name in MODEL_OPTIONS}
    options = {name: value for name, value in given.items() if value != MODEL_OPTIONS[name]}
    conv = models.resolve_conv(config.model.conv, platform)
    return models.create_model(config.model.name, task.outputs, config.model.dtype, conv, **options)


# ---- the state before the first step -------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # so that state_shapes and the programs trace it once
def make_init(plan: RunPlan):
    """Make the function (seed, hyper-parameters, kernel of the frozen stem or None) -> state of one replica."""
    config = plan.config

    def init(seed, hyperparams, kernel):
        params, model_state = models.init_variables(plan.network, plan.image_shape, seed)
        model_state = models.with_whitening(model_state, kernel)
        optimizer = create_optimizer(config.optimizer, hyperparams)
        keeps_ema, takes_local_steps = config.train.ema_decay is not None, plan.first_local_step is not None
        return create_train_state(params, optimizer, seed, model_state, ema=keeps_ema, local=takes_local_steps)

    return jax.jit(init)


def state_shapes(plan: RunPlan) -> TrainState:
    """Return shapes and dtypes of one replica's state before the first step."""
    kernel = None
    if plan.config.model.stem == "whitened":
        kernel = np.zeros(models.whitening_shape(plan.network, plan.image_shape), np.float32)
    return jax.eval_shape(make_init(plan), np.uint32(0), Hyperparams(), kernel)


# ---- what fits ------------------------------------------------------------------------------------------


def choose_plan(
    config: Config, data: DatasetInfo, hardware: Hardware | None = None, free_bytes: int | None = None
) -> RunPlan:
    """Plan a run with the first storage that augment.storage allows and that fits. Collective.

    Args:
      hardware: None for the devices of all hosts.
      free_bytes: free memory of a device; None asks the devices of all hosts.
    Raises:
      BadSetting: none fits; see also `plan_run`.
    """
    hardware, compared = hardware or Hardware.here(), []
    free = memory.least_available_bytes() if free_bytes is None else free_bytes
    storages = possible_storages(config)
    for storage in storages:
        plan = plan_run(config, data, hardware, storage)
        sizes = needed_bytes(plan, free_bytes)
        compared.append(f"{storage} needs {sum(sizes.values()) / 1e6:,.1f} MB a device")
        if free is None or (missing := sum(sizes.values()) - free) <= 0:
            break
    else:
        parts = " + ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in sizes.items())
        needed = f"{parts} = {(free + missing) / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
        too_few = f"{missing / 1e6:,.1f} MB too few; {_hint(plan, sizes)}"
        raise BadSetting(f"does not fit on a device: {needed}, {too_few}")
    if len(storages) > 1:
        told = "this platform does not tell how much is free" if free is None else f"{free / 1e6:,.1f} MB are free"
        log.info("augment.storage: auto takes %s: %s, %s", plan.storage, ", ".join(compared), told)
    return plan


def possible_storages(config: Config) -> tuple[str, ...]:
    """Return what augment.storage allows, in the order in which they are tried."""
    return STORAGES if config.augment.storage == "auto" else (config.augment.storage,)


def needed_bytes(plan: RunPlan, free_bytes: int | None = None) -> dict[str, int]:
    """Estimate the bytes that a run needs on a device, by part.

    Args:
      free_bytes: free memory of a device, where validation images stay if they fit; None asks this host's.
    """
    of_images = bytes_per_device(
        plan.data.layout, plan.sharding, plan.stored_views, buffer_rows=plan.buffer_rows, free_bytes=free_bytes
    )
    size, platform = plan.grouping.micro_batch_size, plan.hardware.platform
    return of_images | bytes_beside_images(plan.network, state_shapes(plan), plan.image_shape, size, platform)


def _hint(plan: RunPlan, sizes: dict[str, int]) -> str:
    """Return what a user can change where a run does not fit; `sizes` are the bytes that it needs, by part."""
    if plan.storage != "streamed":
        smaller = "'on_device' or 'streamed'" if plan.stored_views > 1 else "'streamed'"
        return f"augment.storage {smaller} needs less, and so does each of more devices"
    if sizes[BUFFERS] > 2 * streaming.BUFFER_BYTES:
        return "a buffer holds all that a device needs for one step: a smaller batch.size, or more devices"
    return "a smaller batch.micro_batch_size needs less"

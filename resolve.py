"""From a config to its Setup, and from there to the parts of its programs.

`resolve_setup` derives everything that follows from a config, once. `make_parts` makes the functions that its
programs are compiled from: by `experiment` for the devices here, by `examine` for others.
"""

import functools
import json

import jax
import numpy as np
from flax import linen as nn

import augment
import model as models
from largebatch.cache.cache import RowLayout
from largebatch.config.rules import MODEL_OPTIONS
from largebatch.config.validate import length_problems
from largebatch.data import streaming
from largebatch.data.batching import DataSharding
from largebatch.data.placement import bytes_per_device
from largebatch.data.random_augment import RandomAugment
from largebatch.errors import BadSetting
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory
from largebatch.optim.batch_sizes import batch_sizes_of_devices, resolve_batch_size
from largebatch.optim.optimizers import Hyperparams, OptimizerOptions, create_optimizer
from largebatch.optim.schedules import Schedule, make_schedule
from largebatch.tasks.classification import Classification
from largebatch.tasks.depth import Depth
from largebatch.tasks.mask_depth import MaskDepth
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.segmentation import Segmentation
from largebatch.tasks.task import Task
from largebatch.training.costs import bytes_beside_images, training_costs
from largebatch.training.grouping import plan_micro_batches
from largebatch.training.local_sgd import Sync
from largebatch.training.loss import make_logits_fn, make_loss_fn
from largebatch.training.programs import ProgramParts
from largebatch.training.setup import (
    STORAGES,
    DataFacts,
    ProgramOptions,
    Setup,
    choose_sharding,
    possible_batch_sizes,
    setup_that_fits,
)
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.step import MicroBatchReader, SliceReader, TrainStep
from largebatch.training.views import make_read, make_read_slice

# ---- config -> Setup ------------------------------------------------------------------------------------


def resolve_setup(config, data: DataFacts, hardware: Hardware, storage: str | None = None) -> Setup:
    """The Setup of a config.

    Args:
      hardware: what it will run on.
      storage: in place of augment.storage where that is "auto".
    Raises:
      BadSetting: the config does not go with the data set or the devices.
    """
    config = with_inner_steps(config, data)
    num_devices, views = hardware.num_devices, augment.VIEW_COUNTS[config.augment.views]
    sharding = choose_sharding(config.batch.virtual_shards, data.num_originals, num_devices, views)
    batch_sizes = batch_sizes_of_devices(config.batch, num_devices, sharding.num_examples)
    schedule = make_schedule(config, sharding.num_examples, batch_sizes)
    possible = possible_batch_sizes(config.batch, schedule)
    storage = storage or config.augment.storage
    return Setup(
        config=config,
        hardware=hardware,
        schedule=schedule,
        program=_program_options(config, data, hardware, schedule, possible, sharding, storage=storage),
        hyperparams=Hyperparams.from_config(config.optimizer),
        sync=Sync.from_config(config.sync),
        first_local_step=None if config.sync.mode == "every_step" else config.sync.start_step,
        batch_sizes=tuple(possible.tolist()),
    )


def _program_options(
    config,
    data: DataFacts,
    hardware: Hardware,
    schedule: Schedule,
    batch_sizes: np.ndarray,
    sharding: DataSharding,
    *,
    storage: str,
) -> ProgramOptions:
    """Return what the programs of a config are compiled from; `batch_sizes` are all that its run may come to."""
    task = make_task(config, data.num_classes, data.targets)
    network = make_network(config, task, hardware.platform)
    plan = plan_micro_batches(
        config,
        batch_sizes,
        sharding,
        hardware,
        lambda: training_costs(network, data.image_shape).activation_bytes,
        in_any_order=storage == "expanded" and takes_whole_set(config, sharding.num_examples),
    )
    # The second is what the doctor takes.
    largest = max(int(batch_sizes[-1]), plan.grouping.micro_batch_size * hardware.num_devices)
    stream_rows = streaming.buffer_rows(sharding, data.layout.row_bytes, largest)
    return ProgramOptions(
        dataset=dataset_key(config),
        image_shape=data.image_shape,
        mean=data.mean,
        std=data.std,
        storage=storage,
        buffer_rows=stream_rows if storage == "streamed" else None,
        random_augment=RandomAugment.from_config(config.augment, data.mean),
        sharding=sharding,
        network=network,
        optimizer=config.optimizer.name,
        optimizer_options=OptimizerOptions.from_config(config.optimizer),
        task=task,
        statistics_decay=config.model.norm_decay,
        ema_decay=config.train.ema_decay,
        noise=plan.noise,
        adascale_reference=config.schedule.reference_batch_size if schedule.scale_invariant else None,
        rate_table_length=len(schedule.rate_table) if schedule.scale_invariant else None,
        sync_mode=config.sync.mode,
        sync_policy=config.sync.optimizer_state,
        max_nonfinite=config.train.max_nonfinite if config.train.on_nonfinite == "skip" else 0,
        view_average=config.eval.view_average,
        shift_average=config.eval.shift_average,
        grouping=plan.grouping,
        single_micro_batch=plan.single,
        by_slices=plan.by_slices,
        prediction_micro_batch_size=plan.predicted_at_once,
        inputs_length=1 << (config.train.inner_steps - 1).bit_length(),
    )


def with_inner_steps(config, data: DataFacts):
    """Check that a config goes with its data, and give it a number of updates where train.inner_steps is "pass".

    Returns:
      The config itself, or a copy with train.inner_steps set to the updates of one pass over the originals.
    Raises:
      BadSetting: the config does not go with the data, or with that number of updates.
    """
    augment.check_data(config, data.image_shape, data.targets, f"dataset {config.dataset.name!r}")
    if config.train.inner_steps != "pass":
        return config
    config = config.copy_and_resolve_references()
    num_examples = data.num_originals * augment.VIEW_COUNTS[config.augment.views]
    batch_size = resolve_batch_size(config.batch.size, num_examples)
    with config.ignore_type():
        config.train.inner_steps = -(-data.num_originals // batch_size)
    if problems := length_problems(config):
        raise BadSetting("; ".join(problems))
    return config


def takes_whole_set(config, num_examples: int) -> bool:
    """Tell whether every update of a run takes every example once, as it is."""
    batch, is_changed = config.batch, RandomAugment.from_config(config.augment, ()).is_on
    batch_changes = batch.auto or batch.trace is not None or batch.per_device_batch_size
    if is_changed or batch_changes or config.schedule.decay_by != "rate":
        return False
    return resolve_batch_size(batch.size, num_examples) == num_examples


def choose_setup(
    config,
    data: DataFacts,
    hardware: Hardware | None = None,
    *,
    free_bytes: int | None = None,
) -> Setup:
    """The Setup of a config with the first storage that augment.storage allows and that fits, as hosts agree.

    Args:
      hardware: None for the devices of all hosts.
      free_bytes: on a device; None asks the devices of all hosts.
    Raises:
      BadSetting: none fits; see also `resolve_setup`.
    """
    hardware = hardware or Hardware.here()
    storages = possible_storages(config)
    resolve = functools.partial(resolve_setup, config, data, hardware)
    free = memory.least_available_bytes() if free_bytes is None else free_bytes
    return setup_that_fits(storages, resolve, lambda setup: needed_bytes(setup, data.layout, free_bytes), free)


def possible_storages(config) -> tuple[str, ...]:
    """Return what augment.storage allows, in the order in which they are tried."""
    return STORAGES if config.augment.storage == "auto" else (config.augment.storage,)


def needed_bytes(setup: Setup, layout: RowLayout, free_bytes: int | None = None) -> dict[str, int]:
    """Estimate of what a run needs on a device, by part.

    Args:
      free_bytes: on a device, by which validation images stay there or not; None asks this host's devices.
    """
    program = setup.program
    state = state_shapes(setup)
    of_images = bytes_per_device(
        layout,
        program.sharding,
        program.stored_views,
        buffer_rows=program.buffer_rows,
        free_bytes=free_bytes,
    )
    size, platform = setup.micro_batch_size, setup.hardware.platform
    return of_images | bytes_beside_images(program.network, state, program.image_shape, size, platform)


def state_shapes(setup: Setup) -> TrainState:
    """Shapes and dtypes of one replica's state before the first update."""
    program, kernel = setup.program, None
    if setup.config.model.stem == "whitened":
        kernel = np.zeros(models.whitening_shape(program.network, program.image_shape), np.float32)
    return jax.eval_shape(make_init(program), np.uint32(0), setup.hyperparams, kernel)


def dataset_key(config) -> str:
    """The config fields that decide which data are on the devices, as one string; equal keys mean equal data."""
    augmented = [config.augment.views, config.augment.storage, config.augment.cache_dir]
    return json.dumps([config.dataset.to_dict(), config.task.name, *augmented, config.batch.virtual_shards])


def make_network(config, task: Task, platform: str) -> nn.Module:
    """The network of `config` for its task, as it is computed on `platform`."""
    fields = config.model
    options = {name: fields[name] for name, unset in MODEL_OPTIONS.items() if fields[name] != unset}
    conv = models.resolve_conv(fields.conv, platform)
    return models.create_model(fields.name, task.outputs, fields.dtype, conv, **options)


def make_task(config, num_classes: int, targets: PixelTargets) -> Task:
    """What the network of `config` learns.

    Args:
      num_classes: of images.
      targets: what the data set has for each pixel.
    """
    fields = config.task
    mask, depth = Segmentation(targets.classes, fields.mask_loss), Depth(fields.depth_loss)
    tasks = {
        "classification": Classification(num_classes, config.train.label_smoothing),
        "segmentation": mask,
        "depth": depth,
        "mask_depth": MaskDepth(mask, depth, fields.depth_weight),
    }
    return tasks[fields.name]


# ---- Setup -> programs ------------------------------------------------------------------------------------


def make_init(options: ProgramOptions):
    """The function that makes the state before the first update; see `ProgramParts.init`."""

    def init(seed, hyperparams, kernel):
        params, model_state = models.init_variables(options.network, options.image_shape, seed)
        model_state = models.with_whitening(model_state, kernel)
        optimizer = create_optimizer(options.optimizer, hyperparams, options.optimizer_options)
        keeps_ema, takes_local_steps = options.ema_decay is not None, options.sync_mode != "every_step"
        return create_train_state(params, optimizer, seed, model_state, ema=keeps_ema, local=takes_local_steps)

    return jax.jit(init)


def make_parts(options: ProgramOptions) -> ProgramParts:
    """The functions that the programs of `options` are compiled from.

    Hyper-parameters are not among them, as they are in the optimizer's state: the step takes its optimizer with
    default ones, and runs of other rates or decays share the programs.
    """
    network, scale = options.network, (options.image_shape, options.mean, options.std)
    num_views = options.sharding.views
    read = make_read(options.storage, options.stored_shape, num_views, options.task, options.random_augment)
    reader = MicroBatchReader(read, options.sharding, options.grouping, options.single_micro_batch)
    if options.by_slices:
        read_slice = make_read_slice(options.stored_shape, num_views, options.task)
        reader = SliceReader(read, options.sharding, options.grouping, read_slice=read_slice)
    step = TrainStep(
        loss_fn=make_loss_fn(network, options.image_shape, options.mean, options.std, options.task),
        optimizer=create_optimizer(options.optimizer, Hyperparams(), options.optimizer_options),
        reader=reader,
        max_nonfinite=options.max_nonfinite,
        statistics_decay=options.statistics_decay,
        ema_decay=options.ema_decay or 0.0,
        noise=options.noise,
        adascale_reference=options.adascale_reference,
    )
    logits_fn = make_logits_fn(network, *scale)
    logits_of_views_fn = None
    if options.view_average or options.shift_average:
        logits_of_views_fn = augment.average_over_copies(
            logits_fn,
            num_views=num_views if options.view_average else 1,
            shift=options.shift_average,
            gives_maps=options.task.kind.of_pixels,
        )
    return ProgramParts(
        network=network,
        step=step,
        init=make_init(options),
        task=options.task,
        stored_shape=options.stored_shape,
        logits_fn=logits_fn,
        logits_of_views_fn=logits_of_views_fn,
        prediction_micro_batch_size=options.prediction_micro_batch_size,
        sync_mode=options.sync_mode,
        sync_policy=options.sync_policy,
    )

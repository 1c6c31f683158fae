"""From a config to what a run is made of: Setup -> data on the devices -> compiled programs.

`resolve_setup` derives everything that follows from a config, once. `ProgramCache` places the data and compiles the
programs, and keeps both for the next run of the process that can share them. `prepare` puts it together as an
`Experiment`, which training, evaluation, the doctor, sweeps and benchmarks work on.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
from flax import linen as nn

import augment
import model as models
from largebatch.cache.cache import Cache, RowLayout
from largebatch.cache.plan import FIRST_ROWS
from largebatch.config.rules import MODEL_OPTIONS
from largebatch.data import streaming
from largebatch.data.placement import DeviceData, bytes_per_device, place
from largebatch.data.random_augment import RandomAugment
from largebatch.data.streaming import load_inputs
from largebatch.errors import BadSetting
from largebatch.hosts import collectives, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim.batch_sizes import batch_sizes_of_devices
from largebatch.optim.optimizers import Hyperparams, OptimizerOptions, create_optimizer
from largebatch.optim.schedules import UpdateInputs, make_schedule
from largebatch.training.costs import bytes_beside_images, training_costs
from largebatch.training.evaluation import Scores, SplitLogits, SplitPredictions, predict_split
from largebatch.training.local_sgd import Sync
from largebatch.training.loss import make_logits_fn, make_loss_fn, make_normalise
from largebatch.training.nonfinite import locate_nonfinite
from largebatch.training.programs import CompiledPrograms, ProgramParts, compile_programs
from largebatch.training.setup import (
    DataFacts,
    ProgramOptions,
    Setup,
    choose_micro_batch_size,
    choose_sharding,
    possible_batch_sizes,
    resolve_micro_batch_size,
    setup_that_fits,
    storages_to_try,
)
from largebatch.training.state import TrainState, count_params, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep

# A set of programs takes some 800 memory maps on a CPU; at Linux' limit of 65,530 a process dies.
MAX_PROGRAMS = 30
WHITENING_IMAGES = FIRST_ROWS  # training images whose patches whiten the stem


# ---- config -> Setup ------------------------------------------------------------------------------------


def resolve_setup(
    config, data: DataFacts, num_devices: int, storage: str | None = None, *, packed: bool = False
) -> Setup:
    """The Setup of a config.

    Args:
      num_devices: that share a batch; 1 if `packed`.
      storage: in place of augment.storage where that is "auto".
    Raises:
      BadSetting: the config does not go with the data set or the devices.
    """
    augment.check_image_shape(config, data.image_shape)
    views, num_shards = augment.VIEW_COUNTS[config.augment.views], config.batch.virtual_shards
    sharding = choose_sharding(num_shards, data.num_originals, num_devices, views)
    num_examples = sharding.num_examples
    schedule = make_schedule(config, num_examples, batch_sizes_of_devices(config.batch, num_devices, num_examples))
    possible = possible_batch_sizes(config.batch, schedule)
    micro_batch_size = choose_micro_batch_size(config, possible, sharding)
    storage, buffer_rows = storage or config.augment.storage, None
    if storage == "streamed":
        # At least a micro-batch on every device, which is what the doctor takes.
        largest = max(int(possible[-1]), micro_batch_size * num_devices)
        buffer_rows = streaming.buffer_rows(sharding, data.layout.row_bytes, largest)
    program = ProgramOptions(
        dataset=dataset_key(config),
        image_shape=data.image_shape,
        mean=data.mean,
        std=data.std,
        storage=storage,
        buffer_rows=buffer_rows,
        random_augment=RandomAugment.from_config(config.augment, data.mean),
        sharding=sharding,
        packed=packed,
        network=make_network(config, data.num_classes),
        optimizer=config.optimizer.name,
        optimizer_options=OptimizerOptions.from_config(config.optimizer),
        label_smoothing=config.train.label_smoothing,
        statistics_decay=config.model.norm_decay,
        ema_decay=config.train.ema_decay,
        noise_decay=config.schedule.noise_decay,
        adascale_reference=config.schedule.reference_batch_size if schedule.scale_invariant else None,
        rate_table_length=len(schedule.rate_table) if schedule.scale_invariant else None,
        sync_mode=config.sync.mode,
        sync_policy=config.sync.optimizer_state,
        max_nonfinite=config.train.max_nonfinite if config.train.on_nonfinite == "skip" else 0,
        view_average=config.eval.view_average,
        shift_average=config.eval.shift_average,
        micro_batch_size=micro_batch_size,
        prediction_micro_batch_size=resolve_micro_batch_size(config.batch.micro_batch_size),
        inputs_length=1 << (config.train.inner_steps - 1).bit_length(),
    )
    return Setup(
        config=config,
        schedule=schedule,
        program=program,
        hyperparams=Hyperparams.from_config(config.optimizer),
        sync=Sync.from_config(config.sync),
        first_local_step=None if config.sync.mode == "every_step" else config.sync.start_step,
        batch_sizes=tuple(possible.tolist()),
    )


def choose_setup(config, data: DataFacts, *, packed: bool = False) -> Setup:
    """The Setup of a config with the first storage that augment.storage allows and that fits, as hosts agree.

    Raises:
      BadSetting: none fits; see also `resolve_setup`.
    """
    storages = storages_to_try(config.augment.storage, packed=packed)
    num_devices = 1 if packed else jax.device_count()
    resolve = functools.partial(resolve_setup, config, data, num_devices, packed=packed)
    return setup_that_fits(storages, resolve, lambda setup: needed_bytes(setup, data.layout))


def needed_bytes(setup: Setup, layout: RowLayout) -> dict[str, int]:
    """Estimate of what a run needs on a device, by part."""
    program = setup.program
    state = jax.eval_shape(make_init(program), np.uint32(0), setup.hyperparams, np.zeros(()))
    of_images = bytes_per_device(
        layout, program.sharding, program.stored_views, buffer_rows=program.buffer_rows, packed=program.packed
    )
    return of_images | bytes_beside_images(program.network, state, program.image_shape, program.micro_batch_size)


def dataset_key(config) -> str:
    """The config fields that decide which data are on the devices, as one string; equal keys mean equal data."""
    augmented = [config.augment.views, config.augment.storage, config.augment.cache_dir]
    return json.dumps([config.dataset.to_dict(), *augmented, config.batch.virtual_shards])


def make_network(config, num_classes: int) -> nn.Module:
    """The network of `config`."""
    fields = config.model
    options = {name: fields[name] for name, unset in MODEL_OPTIONS.items() if fields[name] != unset}
    conv = models.resolve_conv(fields.conv, jax.default_backend())
    return models.create_model(fields.name, num_classes, fields.dtype, conv, **options)


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
    read = augment.make_read(options.storage, options.image_shape, num_views, options.random_augment)
    step = TrainStep(
        loss_fn=make_loss_fn(network, *scale, options.label_smoothing),
        optimizer=create_optimizer(options.optimizer, Hyperparams(), options.optimizer_options),
        reader=MicroBatchReader(read, options.sharding, options.micro_batch_size),
        max_nonfinite=options.max_nonfinite,
        statistics_decay=options.statistics_decay,
        ema_decay=options.ema_decay or 0.0,
        noise_decay=options.noise_decay,
        adascale_reference=options.adascale_reference,
        packed=options.packed,
    )
    logits_fn = make_logits_fn(network, *scale)
    logits_of_views_fn = None
    if options.view_average or options.shift_average:
        logits_of_views_fn = augment.average_over_copies(
            logits_fn,
            options.image_shape,
            num_views=num_views if options.view_average else 1,
            shift=options.shift_average,
        )
    return ProgramParts(
        network=network,
        step=step,
        init=make_init(options),
        logits_fn=logits_fn,
        logits_of_views_fn=logits_of_views_fn,
        prediction_micro_batch_size=options.prediction_micro_batch_size,
        sync_mode=options.sync_mode,
        sync_policy=options.sync_policy,
    )


@dataclasses.dataclass(frozen=True)
class PlacedSetup:
    """A Setup whose data are on the devices."""

    setup: Setup
    cache: Cache
    data: DeviceData


class ProgramCache:
    """Data on the devices and compiled programs, for all runs of a process that can share them.

    Args:
      packed: each device trains a run of its own, on all of the data.
    """

    def __init__(self, *, packed: bool = False):
        self.packed, self.local_devices = packed, jax.local_devices()
        self._asked, self._placed, self._kernel = None, None, None
        self._programs: dict[ProgramOptions, CompiledPrograms] = {}

    def load(self, config) -> PlacedSetup:
        """Resolves the config and places its data, unless they are there.

        Of several data sets only the latest is kept, for it fills the devices.

        Raises:
          BadSetting: the config does not go with the data or the devices, or they do not fit.
          UserError: the data set is bad or missing.
        """
        if self.packed and config.sync.mode != "every_step":
            raise BadSetting(
                f"sync.mode: {config.sync.mode!r}; allowed: 'every_step' where each device has its own run"
            )
        if self._asked == dataset_key(config) and (placed := self._placed_for(config)):
            return placed
        self._asked = self._placed = self._kernel = None
        for attempt in augment.cache_attempts(config, to_train=True):
            with attempt as cache:
                setup = choose_setup(config, DataFacts.of(cache), packed=self.packed)
                program = setup.program
                expand = augment.expansion(program.storage, program.sharding.views)
                seed, rows = config.dataset.split_seed, program.buffer_rows
                data = place(cache, program.sharding, seed, expand, buffer_rows=rows, packed=self.packed)
        jax.block_until_ready((data.train.arrays, data.validation.resident))
        self._asked, self._placed = dataset_key(config), PlacedSetup(setup, cache, data)
        return self._placed

    def _placed_for(self, config) -> PlacedSetup | None:
        """What is placed, with the Setup of another config; None where it does not serve that."""
        was = self._placed.setup.program
        data, num_devices = DataFacts.of(self._placed.cache), was.sharding.num_devices
        setup = resolve_setup(config, data, num_devices, was.storage, packed=self.packed)
        if setup.program.buffer_rows != was.buffer_rows or not self._placed.data.train.is_sound:
            return None
        return dataclasses.replace(self._placed, setup=setup)

    def whitening_kernel(self, setup: Setup) -> np.ndarray | None:
        """The kernel of the network's frozen stem, if it has one: host 0's, on every host."""
        if setup.config.model.stem != "whitened":
            return None
        if self._kernel is None:
            for attempt in augment.cache_attempts(setup.config, to_train=True):
                with attempt as cache:
                    kernel = np.zeros(models.whitening_shape(cache.image_shape), np.float32)
                    if collectives.is_primary():
                        rows = np.arange(min(WHITENING_IMAGES, cache.count("train")))
                        images = cache.read_rows("train", rows).reshape(-1, *cache.image_shape)
                        kernel = models.whitening_kernel(images, cache.manifest["mean"], cache.manifest["std"])
            self._kernel = collectives.from_primary(kernel)
        return self._kernel

    def compiled(self, setup: Setup) -> CompiledPrograms:
        """The programs of `setup`, compiled if they are not there yet.

        They are compiled by running them once, so the data that were loaded last must be those of `setup`.
        """
        placed = self._placed
        assert setup.program.dataset == placed.setup.program.dataset, "another data set was loaded since"
        if setup.program not in self._programs:
            if len(self._programs) == MAX_PROGRAMS:
                self._programs.clear()
                jax.clear_caches()
            self._programs[setup.program] = compile_programs(
                make_parts(setup.program),
                placed.data,
                setup.schedule.inputs(0, setup.program.inputs_length),
                setup.sync,
                self.whitening_kernel(setup),
                self.local_devices,
            )
        return self._programs[setup.program]


# ---- the experiment ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation, over all validation examples."""

    scores: Scores
    logits: SplitLogits  # of the plain parameters; still on the devices
    other_accuracies: dict[str, float]  # over views and shifts, of the moving average; by the name of their metric


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run that is ready to train. Where the batch grows, the trainer's schedule goes beyond this one's."""

    setup: Setup
    cache: Cache
    data: DeviceData
    programs: CompiledPrograms
    num_params: int
    flops_per_image: float  # of a training image, forward and backward

    def validate(self, state: TrainState) -> Validation:
        """Validates the parameters, and beside them what the config asks for; on every host.

        Raises:
          RuntimeError: the replicas no longer hold the same parameters.
          UserError: validation images that do not stay on the devices cannot be read.
        """
        programs, others = self.programs, {}
        if programs.predict_views:
            others["val_accuracy_views"] = self._accuracy(programs.predict_views, state.variables)
        if state.ema is not None:
            others["val_accuracy_ema"] = self._accuracy(programs.predict, state.ema_variables)
        if state.ema is not None and programs.predict_views:
            others["val_accuracy_ema_views"] = self._accuracy(programs.predict_views, state.ema_variables)
        # Last, since its logits are kept: no other ones are on the devices beside them.
        plain = self._predict(programs.predict, state.variables)
        replicas.check_replicas(state.variables, "parameters")
        return Validation(plain.scores, plain.logits, others)

    def locate_nonfinite(self, state: TrainState, update: UpdateInputs) -> str:
        """The first layer, from input to output, that is not finite in an update of `state`; in words."""
        program, step = self.setup.program, self.programs.parts.step
        normalise = make_normalise(program.network, program.image_shape, program.mean, program.std)
        inputs, seed = jax.tree.map(np.atleast_1d, update), replicas.first_replica(state.seed)
        data = load_inputs(self.data.train, program.sharding, seed, inputs).arrays
        return locate_nonfinite(program.network, normalise, step, state, data, update)

    def _predict(self, predict, variables) -> SplitPredictions:
        micro_batch_size = self.setup.program.prediction_micro_batch_size
        return predict_split(predict, variables, self.data.validation, micro_batch_size)

    def _accuracy(self, predict, variables) -> float:
        return self._predict(predict, variables).scores.accuracy


def prepare(config, clock: Clock, shared: ProgramCache) -> tuple[Experiment, TrainState]:
    """Places the data, compiles the programs and makes the state before the first update.

    Args:
      clock: takes the seconds of the sections "data" and "compile".
      shared: keeps data and programs for the next run of this process.
    Raises:
      BadSetting, UserError: see `ProgramCache.load`.
    """
    with clock.measure("data"):
        placed = shared.load(config)
    setup = placed.setup
    with clock.measure("compile"):
        compiled = shared.compiled(setup)
        kernel = shared.whitening_kernel(setup)
        one_replica = compiled.parts.init(np.uint32(config.seed), setup.hyperparams, kernel)
        state = replicas.replicate(one_replica, shared.local_devices)
        replicas.check_replicas(state.params, "initial parameters")
    experiment = Experiment(
        setup=setup,
        cache=placed.cache,
        data=placed.data,
        programs=compiled,
        num_params=count_params(one_replica.params),
        flops_per_image=training_costs(setup.program.network, setup.program.image_shape).flops,
    )
    return experiment, state

"""The programs and data of a run: RunPlan -> Programs, and the data set on the devices.

`programs_of` makes the functions that are compiled. `ProgramCache` places the data and keeps data and programs for
the next run of the process; `prepare` puts it all together for a run.
"""

import dataclasses
import functools
import logging
from collections.abc import Hashable
from typing import NamedTuple

import jax
import numpy as np

import augment
import model as models
from largebatch.config.fields import Config
from largebatch.data.cache import Cache, DamagedCache, DatasetInfo
from largebatch.data.placement import DeviceData, place, train_shapes
from largebatch.data.random_augment import RandomAugment
from largebatch.hardware.chips import Hardware
from largebatch.hosts import collectives, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim.optimizers import Hyperparams, create_optimizer
from largebatch.training.evaluation import make_predict
from largebatch.training.local_sgd import LocalSGD, Sync, make_local_loop
from largebatch.training.loss import make_logits_fn, make_loss_fn
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState, count_params
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop
from largebatch.training.views import expansion, make_read, make_read_slice
from largebatch.util import UserError
from plan import RunPlan, choose_plan, data_fields, make_init, plan_run, state_shapes

log = logging.getLogger("largebatch")

# A set of programs takes some 800 memory maps on a CPU; at Linux' limit of 65,530 a process dies.
MAX_PROGRAMS = 30
WHITENING_IMAGES = 2048  # training images whose patches whiten the stem


# ---- programs -------------------------------------------------------------------------------------------


def make_step(plan: RunPlan) -> TrainStep:
    """Make the training step.

    Hyper-parameters are in the optimizer's state, so the step takes an optimizer with default ones, and runs of
    other rates or decays share the programs.
    """
    config, shape, views = plan.config, plan.data.layout.image_shape, plan.sharding.views
    random_augment = RandomAugment.from_config(config.augment, plan.data.mean)
    read = make_read(plan.storage, shape, views, plan.task, random_augment)
    read_slice = make_read_slice(shape, views, plan.task) if plan.micro_batches.by_slices else None
    reader = MicroBatchReader(read, plan.sharding, plan.grouping, plan.micro_batches.single, read_slice)
    return TrainStep(
        loss_fn=make_loss_fn(plan.network, plan.image_shape, plan.data.mean, plan.data.std, plan.task),
        optimizer=create_optimizer(config.optimizer, Hyperparams()),
        reader=reader,
        max_nonfinite=plan.max_nonfinite,
        statistics_decay=config.model.norm_decay,
        ema_decay=config.train.ema_decay or 0.0,
        noise=plan.micro_batches.noise,
        adascale_reference=config.schedule.reference_batch_size if plan.schedule.scale_invariant else None,
    )


def programs_of(plan: RunPlan, devices: list | None = None) -> Programs:
    """Make all programs of a plan, to run on this host's devices or to compile for `devices` elsewhere."""
    logits_fn = make_logits_fn(plan.network, plan.image_shape, plan.data.mean, plan.data.std)
    averaged_fn, evaluation = None, plan.config.eval
    if evaluation.view_average or evaluation.shift_average:
        averaged_fn = augment.average_over_copies(
            logits_fn,
            num_views=plan.sharding.views if evaluation.view_average else 1,
            shift=evaluation.shift_average,
            gives_maps=plan.task.kind.of_pixels,
        )
    size, layout, task, step = plan.micro_batches.predicted_at_once, plan.data.layout, plan.task, make_step(plan)
    state = state_shapes(plan)
    data = train_shapes(layout, plan.sharding, plan.stored_views, plan.buffer_rows)
    sums = jax.eval_shape(step.zero_sums, state, data)
    sync, metric_names, local = plan.config.sync, set(step.metric_names(sums)), None
    if sync.mode != "every_step":
        local = LocalSGD(dataclasses.replace(step, noise=None), sync.optimizer_state)
        metric_names |= {"drift", "synced", "local"}

    def predict_with(function):
        return function and make_predict(function, task, layout.image_shape, size, devices=devices)

    return Programs(
        network=plan.network,
        task=task,
        step=step,
        init=make_init(plan),
        inner_loop=make_inner_loop(step, devices) if sync.mode != "local" else None,
        local_loop=local and make_local_loop(local, devices),
        average=local and replicas.pmap(local.average, devices=devices),
        predict=predict_with(logits_fn),
        predict_views=predict_with(averaged_fn),
        predict_images=jax.jit(lambda variables, images: task.predictions(logits_fn(variables, images))),
        prediction_micro_batch_size=size,
        metric_names=tuple(sorted(metric_names)),
        allreduce_bytes=4 * count_params(sums),  # gradients, statistics and scalars, all float32
        sync_bytes=local.sync_bytes(state) if local else 0,
    )


# ---- data and programs of several runs ------------------------------------------------------------------


class Placed(NamedTuple):
    """A plan, and its data on the devices."""

    plan: RunPlan
    data: DeviceData


class Prepared(NamedTuple):
    """A run that is ready to train; `state` is that before the first step."""

    plan: RunPlan
    data: DeviceData
    programs: Programs
    state: TrainState


class ProgramCache:
    """Data on the devices and compiled programs, for all runs of a process that can share them."""

    def __init__(self):
        self._data_of, self._placed, self._kernels = None, None, {}
        self._programs: dict[Hashable, Programs] = {}

    def load(self, config: Config) -> Placed:
        """Plan a run and place its data, unless they are there. Only the latest data set is kept.

        Raises:
          BadSetting: the config does not go with the data or the devices, or they do not fit.
          UserError: the data set is bad or missing.
        """
        placed = self._placed
        if self._data_of == data_fields(config) and placed.data.train.is_sound:
            plan = plan_run(config, placed.plan.data, Hardware.here(), placed.plan.storage)
            if plan.data_key == placed.plan.data_key:
                return Placed(plan, placed.data)
        self._data_of = self._placed = placed = None  # before other data take its memory
        self._kernels = {}

        def plan_and_place(cache: Cache) -> Placed:
            plan = choose_plan(config, DatasetInfo.of(cache))
            expand, seed = expansion(plan.storage, plan.sharding.views), config.dataset.split_seed
            return Placed(plan, place(cache, plan.sharding, seed, expand, buffer_rows=plan.buffer_rows))

        self._placed = augment.with_cache(config, plan_and_place)
        jax.block_until_ready((self._placed.data.train.arrays, self._placed.data.validation.resident))
        self._data_of = data_fields(config)
        return self._placed

    def whitening_kernel(self, plan: RunPlan) -> np.ndarray | None:
        """Return the kernel of the network's frozen stem, if it has one: host 0's, on every host."""
        if plan.config.model.stem != "whitened":
            return None
        network, data = plan.network, self._placed.data
        if network.patches not in self._kernels:
            kernel = np.zeros(models.whitening_shape(network, plan.data.layout.image_shape), np.float32)
            collectives.agreed(functools.partial(_whiten, network, data.cache, kernel), collectives.is_primary())
            self._kernels[network.patches] = collectives.from_primary(kernel)
        return self._kernels[network.patches]

    def programs(self, plan: RunPlan) -> Programs:
        """Return the programs of a plan whose data were loaded last; compile them at the first call."""
        assert plan.data_key == self._placed.plan.data_key, "another data set was loaded since"
        key = plan.program_key
        if key not in self._programs:
            if len(self._programs) == MAX_PROGRAMS:
                self._programs.clear()
                jax.clear_caches()
            log.info("compiling")  # may take minutes
            programs = programs_of(plan)
            state = replicas.replicate(programs.init(np.uint32(0), Hyperparams(), self.whitening_kernel(plan)))
            inputs, sync = plan.schedule.inputs(0, plan.inputs_length), Sync.from_config(plan.config.sync)
            programs.compile_here(state, self._placed.data, inputs, sync)
            self._programs[key] = programs
        return self._programs[key]


def _whiten(network, cache: Cache, kernel: np.ndarray) -> None:
    """Fill in the kernel of a whitened stem, from the first training images.

    Raises:
      UserError: the cache was damaged since the data were placed.
    """
    train = cache.split("train")
    try:
        images = train.images(np.arange(min(WHITENING_IMAGES, len(train.ids))))
    except DamagedCache as damage:
        raise UserError(f"augment.cache_dir: {damage}; start again to build the cache anew") from damage
    kernel[...] = models.whitening_kernel(network, images, cache.manifest["mean"], cache.manifest["std"])


def prepare(config: Config, clock: Clock, shared: ProgramCache) -> Prepared:
    """Plan a run, place its data, compile its programs and make the state before the first step.

    Args:
      clock: takes the seconds of the sections "data" and "compile".
      shared: keeps data and programs for the next run of this process.
    Raises:
      BadSetting, UserError: see `ProgramCache.load`.
    """
    with clock.measure("data"):
        plan, data = shared.load(config)
    with clock.measure("compile"):
        programs, hyperparams = shared.programs(plan), Hyperparams.from_config(config.optimizer)
        one_replica = programs.init(np.uint32(config.seed), hyperparams, shared.whitening_kernel(plan))
        state = replicas.replicate(one_replica)
        replicas.check_replicas(state.params, "initial parameters")
    return Prepared(plan, data, programs, state)

"""The programs of a run: the loops that train, and the predictions that validate."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from flax import linen as nn

from largebatch.data.placement import DeviceData
from largebatch.data.validation import Block
from largebatch.nn.layers import STATISTICS
from largebatch.optim.schedules import UpdateInputs
from largebatch.tasks.task import Task
from largebatch.training import local_sgd
from largebatch.training.evaluation import make_predict
from largebatch.training.local_sgd import LocalStep, Sync
from largebatch.training.state import TrainState, count_params
from largebatch.training.step import TrainStep, make_inner_loop


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run, pmapped. They serve every seed, batch size, schedule and hyper-parameter.

    Attributes:
      network: the network.
      task: its task.
      step: the step of the loops.
      init: (seed, hyper-parameters, kernel of the frozen stem or None) -> one replica's first state.
      inner_loop: see `step.make_inner_loop`; None where all steps are local.
      local_loop, average: see `local_sgd.make_local_loop` and `make_average`; None where all steps are synchronous.
      predict: (variables, block of a split) -> sums and logits, see `evaluation.make_predict`.
      predict_views: as `predict`, averaged over views and shifts of an image; None where not asked for.
      predict_images: (variables, integer images [M, H, W, C]) -> `Task.predictions`, on one device.
      prediction_micro_batch_size: images that one device predicts at once.
      metric_names: names of the metrics that the loops return beside the state.
      allreduce_bytes: bytes that a device puts into the all-reduce of a synchronous step.
      sync_bytes: bytes that a device puts into the all-reduce of an average after local steps.
    """

    network: nn.Module
    task: Task
    step: TrainStep
    init: Callable[..., TrainState]
    inner_loop: Callable | None
    local_loop: Callable | None
    average: Callable | None
    predict: Callable
    predict_views: Callable | None
    predict_images: Callable
    prediction_micro_batch_size: int
    metric_names: tuple[str, ...]
    allreduce_bytes: int
    sync_bytes: int


@dataclasses.dataclass(frozen=True)
class Predictors:
    """The functions that predict images, and their sizes.

    Attributes:
      logits_fn: (variables, integer images [M, H, W, C]) -> outputs of the network, float32.
      averaged_fn: as `logits_fn`, averaged over copies of an image; None where not asked for.
      stored_shape: height, width and channels of an image as it is stored, with its dense targets.
      micro_batch_size: images that one device predicts at once.
    """

    logits_fn: Callable
    averaged_fn: Callable | None
    stored_shape: tuple[int, int, int]
    micro_batch_size: int


def make_programs(
    network: nn.Module,
    task: Task,
    step: TrainStep,
    init: Callable[..., TrainState],
    predictors: Predictors,
    sync: tuple[str, str],
    *,
    shapes: tuple[TrainState, dict],
    devices: list | None = None,
) -> Programs:
    """Pmap the programs of a run. They are compiled at their first call, or by `lower`.

    Args:
      sync: sync.mode and sync.optimizer_state of the config.
      shapes: shapes of one replica's state, and of one device's training data.
      devices: those to compile for, which need not be attached; None for this host's.
    """
    (mode, policy), (state, data) = sync, shapes
    zeros = jax.eval_shape(step.zero_sums, state, data)
    metric_names = set(step.metric_names(zeros))
    inner_loop = local_loop = average = None
    statistics = (STATISTICS,) if STATISTICS in state.model_state else ()
    if mode != "local":
        inner_loop = make_inner_loop(step, devices)
    if mode != "every_step":
        local = LocalStep(dataclasses.replace(step, noise=None), policy, statistics)
        local_loop = local_sgd.make_local_loop(local, devices)
        average = local_sgd.make_average(statistics, policy, devices=devices)
        metric_names |= {"drift", "synced", "local"}

    def predict_with(logits_fn):
        shape, size = predictors.stored_shape, predictors.micro_batch_size
        return make_predict(logits_fn, task, shape, size, devices=devices)

    return Programs(
        network=network,
        task=task,
        step=step,
        init=init,
        inner_loop=inner_loop,
        local_loop=local_loop,
        average=average,
        predict=predict_with(predictors.logits_fn),
        predict_views=predict_with(predictors.averaged_fn) if predictors.averaged_fn else None,
        predict_images=jax.jit(lambda variables, images: task.predictions(predictors.logits_fn(variables, images))),
        prediction_micro_batch_size=predictors.micro_batch_size,
        metric_names=tuple(sorted(metric_names)),
        allreduce_bytes=4 * count_params(zeros),  # gradients, statistics and scalars, all float32
        sync_bytes=local_sgd.bytes_of_sync(state, statistics, policy) if local_loop else 0,
    )


def compile_here(programs: Programs, state: TrainState, data: DeviceData, inputs: UpdateInputs, sync: Sync) -> None:
    """Compile all programs by running each once; pmap cannot compile ahead of time on several hosts.

    Args:
      state: state of all replicas; donated.
      inputs: inputs of any steps; none is run.
    """
    if programs.inner_loop:
        state, _ = programs.inner_loop(state, data.train.arrays, inputs, np.int32(0))
    if programs.local_loop:
        state, _ = programs.local_loop(state, data.train.arrays, inputs, np.int32(0), sync)
        state = programs.average(state)
    block = next(data.validation.blocks(programs.prediction_micro_batch_size))
    for predict in (programs.predict_views, programs.predict):
        if predict:
            jax.block_until_ready(predict(state.variables, block))


def lower(
    programs: Programs, shapes: tuple[TrainState, dict, Block], inputs: UpdateInputs, sync: Sync, devices: list
) -> dict[str, jax.stages.Lowered]:
    """Lower all programs for devices that need not be attached; return them by name.

    Args:
      shapes: one device's state, training data and block of the validation split.
      devices: those that the programs were made for.
    """
    count, inputs, sync = jax.ShapeDtypeStruct((), np.int32), _shapes(inputs), _shapes(sync)
    states, data, block = (_on_each(tree, devices) for tree in shapes)
    lowered = {}
    if programs.inner_loop:
        lowered["update"] = programs.inner_loop.lower(states, data, inputs, count)
    if programs.local_loop:
        lowered["local update"] = programs.local_loop.lower(states, data, inputs, count, sync)
        lowered["average"] = programs.average.lower(states)
    lowered["validation"] = programs.predict.lower(states.variables, block)
    if programs.predict_views:
        lowered["validation of copies"] = programs.predict_views.lower(states.variables, block)
    return lowered


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def _on_each(tree, devices: list):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), tree)

"""The compiled programs of a run: the loops that train, and the predictions that validate."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import linen as nn

from largebatch.data.placement import DeviceData
from largebatch.data.validation import DealtSplit
from largebatch.hosts import replicas
from largebatch.nn.normalisation import STATISTICS
from largebatch.optim.optimizers import Hyperparams
from largebatch.optim.schedules import UpdateInputs
from largebatch.tasks.task import Task
from largebatch.training import local_sgd
from largebatch.training.evaluation import make_predict
from largebatch.training.local_sgd import LocalStep, Sync
from largebatch.training.state import TrainState, count_params
from largebatch.training.step import TrainStep, make_inner_loop


@dataclasses.dataclass(frozen=True)
class ProgramParts:
    """What programs are made of."""

    network: nn.Module
    step: TrainStep
    # (seed, hyper-parameters, kernel of the frozen stem or None) -> one replica's state before the first update
    init: Callable[..., TrainState]
    task: Task
    stored_shape: tuple[int, int, int]  # of an image, with what is to be predicted of it
    logits_fn: Callable  # see evaluation.make_predict
    logits_of_views_fn: Callable | None  # the mean over views and shifts of an image; None where not asked for
    prediction_micro_batch_size: int
    sync_mode: str  # every_step | local | post_local
    sync_policy: str  # see local_sgd.LocalStep

    def predictions(self, variables, images) -> jax.Array:
        """See `Task.predictions`, of integer images [M, H, W, C]."""
        return self.task.predictions(self.logits_fn(variables, images))


@dataclasses.dataclass(frozen=True)
class CompiledPrograms:
    """The compiled part of a run, which serves every seed, batch size, schedule and hyper-parameter."""

    parts: ProgramParts
    inner_loop: Callable | None  # see step.make_inner_loop; None where all updates are local steps
    local_loop: Callable | None  # see local_sgd.make_local_loop; None where all updates are synchronous
    average: Callable | None  # see local_sgd.make_average; as local_loop
    predict: Callable  # (variables, block of a split) -> sums and logits, see evaluation.make_predict
    predict_views: Callable | None
    predict_images: Callable  # (variables, integer images [M, H, W, C]) -> Task.predictions, on one device
    metric_names: tuple[str, ...]  # of what the loops return beside the state
    allreduce_bytes: int  # that a device puts into the all-reduce of a synchronous update
    sync_bytes: int  # that it puts into that of a synchronisation after local steps

    @property
    def network(self) -> nn.Module:
        """The network that is trained."""
        return self.parts.network

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer, with the hyper-parameters in its state."""
        return self.parts.step.optimizer


def compile_programs(
    parts: ProgramParts, data: DeviceData, inputs: UpdateInputs, sync: Sync, kernel: np.ndarray | None, on: list
) -> CompiledPrograms:
    """Compiles by running each program once; pmap's ahead-of-time way does not know several hosts.

    Args:
      inputs: of any updates; none is done.
      kernel: of the frozen stem, if the network has one.
      on: this host's devices.
    """
    one_replica = parts.init(np.uint32(0), Hyperparams(), kernel)
    state = replicas.replicate(one_replica, on)
    statistics = (STATISTICS,) if STATISTICS in one_replica.model_state else ()
    inner_loop = local_loop = average = None
    no_updates = np.int32(0)
    metric_names = set()
    if parts.sync_mode != "local":
        inner_loop = make_inner_loop(parts.step)
        state, metrics = inner_loop(state, data.train.arrays, inputs, no_updates)
        metric_names.update(metrics)
    if parts.sync_mode != "every_step":
        step = dataclasses.replace(parts.step, noise=None)
        local_loop = local_sgd.make_local_loop(LocalStep(step, parts.sync_policy, statistics))
        average = local_sgd.make_average(statistics, parts.sync_policy)
        state, metrics = local_loop(state, data.train.arrays, inputs, no_updates, sync)
        state = average(state)
        metric_names.update(metrics)

    predict, predict_views = _compile_predictions(parts, state.variables, data.validation)
    return CompiledPrograms(
        parts=parts,
        inner_loop=inner_loop,
        local_loop=local_loop,
        average=average,
        predict=predict,
        predict_views=predict_views,
        predict_images=jax.jit(parts.predictions),
        metric_names=tuple(sorted(metric_names)),
        allreduce_bytes=_allreduce_bytes(parts.step, one_replica, data.train.arrays),
        sync_bytes=local_sgd.bytes_of_sync(one_replica, statistics, parts.sync_policy) if local_loop else 0,
    )


def _compile_predictions(parts: ProgramParts, variables, split: DealtSplit) -> tuple[Callable, Callable | None]:
    micro_batch_size = parts.prediction_micro_batch_size
    block = next(split.blocks(micro_batch_size))

    def compiled(logits_fn):
        predict = make_predict(logits_fn, parts.task, parts.stored_shape, micro_batch_size)
        jax.block_until_ready(predict(variables, block))
        return predict

    predict_views = None
    if parts.logits_of_views_fn is not None:
        predict_views = compiled(parts.logits_of_views_fn)
    return compiled(parts.logits_fn), predict_views


def _allreduce_bytes(step: TrainStep, state: TrainState, data) -> int:
    """The size of what a device adds to the sums of a batch: gradients, statistics and scalars, all float32."""
    data_of_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)
    return 4 * count_params(jax.eval_shape(step.zero_sums, state, data_of_device))

"""A run's programs, lowered from shapes alone: to be compiled for devices that are not here, without data."""

import dataclasses

import jax
import numpy as np

from largebatch.cache.cache import RowLayout
from largebatch.data.validation import Block, rows_per_block, stays_on_devices
from largebatch.nn.normalisation import STATISTICS
from largebatch.training import local_sgd
from largebatch.training.evaluation import make_predict
from largebatch.training.local_sgd import LocalStep
from largebatch.training.programs import ProgramParts
from largebatch.training.setup import ProgramOptions, Setup
from largebatch.training.state import TrainState
from largebatch.training.step import make_inner_loop


def lower_programs(
    parts: ProgramParts, setup: Setup, state: TrainState, layout: RowLayout, free_bytes: int, devices: list
) -> dict[str, jax.stages.Lowered]:
    """The programs that `programs.compile_programs` compiles, by name, lowered for `devices`.

    Args:
      state: shapes of one replica's state before the first update.
      layout: of the data set.
      free_bytes: on a device, by which validation images stay there or not.
    """
    inputs = _shapes(setup.schedule.inputs(0, setup.program.inputs_length))
    states, data = _on_each(state, devices), _on_each(train_shapes(setup.program, layout), devices)
    count = jax.ShapeDtypeStruct((), np.int32)
    lowered = {}
    if parts.sync_mode != "local":
        lowered["update"] = make_inner_loop(parts.step, devices).lower(states, data, inputs, count)
    if parts.sync_mode != "every_step":
        statistics = (STATISTICS,) if STATISTICS in state.model_state else ()
        step = dataclasses.replace(parts.step, noise=None)
        loop = local_sgd.make_local_loop(LocalStep(step, parts.sync_policy, statistics), devices)
        lowered["local update"] = loop.lower(states, data, inputs, count, _shapes(setup.sync))
        average = local_sgd.make_average(statistics, parts.sync_policy, devices=devices)
        lowered["average"] = average.lower(states)
    block = _on_each(validation_shapes(setup.program, layout, free_bytes), devices)
    predictions = {"validation": parts.logits_fn, "validation of copies": parts.logits_of_views_fn}
    for name, logits_fn in predictions.items():
        if logits_fn is not None:
            predict = make_predict(
                logits_fn, parts.task, parts.stored_shape, parts.prediction_micro_batch_size, devices=devices
            )
            lowered[name] = predict.lower(states.variables, block)
    return lowered


def train_shapes(program: ProgramOptions, layout: RowLayout) -> dict:
    """Shapes of what a device has of the training set."""
    originals = program.sharding.max_originals
    pixels = int(np.prod(program.stored_shape))
    labels = jax.ShapeDtypeStruct((originals,), np.int32)
    if program.storage == "streamed":
        images = jax.ShapeDtypeStruct((program.buffer_rows, pixels), layout.dtype)
        return {"images": images, "rows": labels, "labels": labels}
    images = jax.ShapeDtypeStruct((originals * program.stored_views, pixels), layout.dtype)
    return {"images": images, "labels": labels}


def validation_shapes(program: ProgramOptions, layout: RowLayout, free_bytes: int) -> Block:
    """Shapes of the block of the validation split that a device predicts at once."""
    rows = -(-layout.counts["val"] // program.sharding.num_devices)
    if not stays_on_devices(rows * layout.row_bytes, free_bytes):
        rows = rows_per_block(rows, layout.row_bytes, program.prediction_micro_batch_size)
    pixels = int(np.prod(layout.image_shape))
    images = jax.ShapeDtypeStruct((rows, pixels), layout.dtype)
    return Block(images, jax.ShapeDtypeStruct((rows,), np.int32))


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def _on_each(tree, devices: list):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype), tree)

"""Search for the first layer with a non-finite value in a step."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct, traverse_util
from jax import lax

from largebatch.data import batching
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.nn.layers import STATISTICS
from largebatch.optim.schedules import UpdateInputs
from largebatch.runs import checkpoints
from largebatch.training.loss import Batch
from largebatch.training.state import TrainState
from largebatch.training.step import TrainStep


@struct.dataclass
class NonFiniteCounts:
    """Numbers of non-finite values in a step, int32, over the whole batch."""

    outputs: list[jax.Array]  # in the output of each layer, from input to output
    gradients: dict  # in the gradients, like the parameters


@dataclasses.dataclass
class _LayerOutputs:
    """A function that returns the outputs of a network's layers; tracing it notes their names."""

    network: nn.Module
    normalise: Callable  # see loss.make_normalise
    names: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, params, model_state, batch: Batch) -> list[jax.Array]:
        _, kept = self.network.apply(
            {"params": params, **model_state},
            self.normalise(batch.images),
            batch.weights,
            capture_intermediates=True,
            mutable=["intermediates", STATISTICS],
        )
        by_path = traverse_util.flatten_dict(kept["intermediates"])
        self.names = ["/".join(path[:-1]) or "logits" for path in by_path]
        return [outputs[0] for outputs in by_path.values()]


def locate_nonfinite(
    network: nn.Module, normalise: Callable, step: TrainStep, state: TrainState, data, update: UpdateInputs
) -> str:
    """Describe where a step first has a non-finite value: in a layer's output, else in a gradient.

    Args:
      normalise: see loss.make_normalise.
      step: the training step that was taken.
      state: state before that step, and `data` of each device; with a leading local-device axis.
    """
    layer_outputs = _LayerOutputs(network, normalise)
    counts = count_nonfinite(layer_outputs, step, state, data, update)
    for name, count in zip(layer_outputs.names, counts.outputs, strict=True):
        if count:
            return f"first in the output of layer {name}"
    # Gradients run from output to input.
    names = [name for name, count in checkpoints.named_leaves(counts.gradients).items() if count]
    if not names:
        return "no single layer's output or gradient is"
    last = max(names, key=lambda name: layer_outputs.names.index(name.rpartition(".")[0].replace(".", "/")))
    return f"first in the gradient of {last}"


def count_nonfinite(
    layer_outputs: Callable, step: TrainStep, state: TrainState, data, update: UpdateInputs
) -> NonFiniteCounts:
    """Count the non-finite values of a step, over all devices.

    Args:
      layer_outputs: (params, model state, batch) -> the outputs of the network's layers.
      step, state, data, update: see `locate_nonfinite`.
    """
    reader = step.reader

    def count(state, data, update):
        def counts_of(batch):
            grads, _ = jax.grad(step.loss_fn, has_aux=True)(state.params, state.model_state, batch)
            values = NonFiniteCounts(layer_outputs(state.params, state.model_state, batch), grads)
            return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.int32), values)

        shapes = jax.eval_shape(counts_of, reader.example_batch(data))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        device = lax.axis_index(AXIS)
        batch = batching.device_batch(reader.sharding, device, update.epoch, update.offset, update.batch_size)
        return lax.psum(reader.sum_over(counts_of, zeros, data, batch, state.seed), AXIS)

    return pmap(count, in_axes=(0, 0, None), out_axes=None)(state, data, update)

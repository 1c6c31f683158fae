"""Search for the first layer with a non-finite value in a step."""

from collections import OrderedDict
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import lax

from largebatch.hosts.replicas import AXIS, pmap
from largebatch.nn.layers import STATISTICS
from largebatch.optim.schedules import StepInputs
from largebatch.runs import checkpoints
from largebatch.training.loss import Batch
from largebatch.training.state import TrainState
from largebatch.training.step import TrainStep


def locate_nonfinite(
    network: nn.Module, normalise: Callable, step: TrainStep, state: TrainState, data, inputs: StepInputs
) -> str:
    """Describe where a step first has a non-finite value: in a layer's output, else in a gradient.

    Args:
      normalise: see loss.make_normalise.
      step: the training step that was taken.
      state: state before that step, and `data` of each device; with a leading local-device axis.
      inputs: those of the step.
    """

    def layer_outputs(params, model_state, batch: Batch) -> OrderedDict:
        """Return the outputs of the network's layers by name, from input to output."""
        _, collections = network.apply(
            {"params": params, **model_state},
            normalise(batch.images),
            batch.weights,
            capture_intermediates=True,
            mutable=["intermediates", STATISTICS],
        )
        by_path = traverse_util.flatten_dict(collections["intermediates"])
        # Unlike a dict's, its order outlives a transformation by JAX.
        return OrderedDict(("/".join(path[:-1]) or "logits", outputs[0]) for path, outputs in by_path.items())

    reader = step.reader

    def count_nonfinite(state, data, inputs):
        def counts_of(batch):
            grads, _ = jax.grad(step.loss_fn, has_aux=True)(state.params, state.model_state, batch)
            values = layer_outputs(state.params, state.model_state, batch), grads
            return jax.tree.map(lambda x: jnp.sum(~jnp.isfinite(x), dtype=jnp.int32), values)

        shapes = jax.eval_shape(counts_of, reader.example_batch(data))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        batch = reader.device_batch(lax.axis_index(AXIS), inputs)
        return lax.psum(reader.sum_over(counts_of, zeros, data, batch, state.seed), AXIS)

    outputs, gradients = pmap(count_nonfinite, in_axes=(0, 0, None), out_axes=None)(state, data, inputs)
    for name, count in outputs.items():
        if count:
            return f"first in the output of layer {name}"
    # Gradients run from output to input.
    names = [name for name, count in checkpoints.named_leaves(gradients).items() if count]
    if not names:
        return "no single layer's output or gradient is"
    layers = list(outputs)
    last = max(names, key=lambda name: layers.index(name.rpartition(".")[0].replace(".", "/")))
    return f"first in the gradient of {last}"

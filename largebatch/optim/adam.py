"""Adam with decays that may change from step to step, as they do with the batch size.

A moving average that starts at zero has to be divided by the weight of the gradients in it, which is 1 minus the
product of all decays so far. optax takes the decay of the latest step for all of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct


@struct.dataclass
class Average:
    """A moving average that started at zero."""

    value: Any  # pytree
    weight_of_start: jax.Array  # float32, the product of the decays so far

    @classmethod
    def start(cls, like) -> "Average":
        """Create an empty moving average shaped like the pytree `like`."""
        return cls(jax.tree.map(jnp.zeros_like, like), jnp.ones(()))

    def add(self, new, decay) -> "Average":
        """Return the average after one more value: decay * value + (1 - decay) * new."""
        value = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, self.value, new)
        return Average(value, self.weight_of_start * decay)

    @property
    def corrected(self):
        """The average of the values added, without the zero that it started from."""
        return jax.tree.map(lambda value: value / (1 - self.weight_of_start), self.value)


@struct.dataclass
class AdamState:
    """First and second moments of the gradients of all parameters."""

    first: Average
    second: Average


def scale_by_adam(b1, b2, eps: float = 1e-8, *, nesterov: bool = False) -> optax.GradientTransformation:
    """Create Adam (Kingma and Ba 2015, "Adam", algorithm 1), with `nesterov` NAdam.

    Args:
      b1, b2: decays of the moments at the next step; may be traced.
      nesterov: Dozat 2016, "Incorporating Nesterov Momentum".
    """

    def init(params):
        return AdamState(Average.start(params), Average.start(params))

    def update(grads, state, params=None):
        del params
        first = state.first.add(grads, b1)
        second = state.second.add(jax.tree.map(jnp.square, grads), b2)
        directions = look_ahead(first, grads, b1) if nesterov else first.corrected
        directions = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), directions, second.corrected)
        return directions, AdamState(first, second)

    return optax.GradientTransformation(init, update)


def look_ahead(average: Average, grads, decay):
    """Return the average after the next step, for whose unknown gradient this one stands.

    As in optax, both parts are corrected separately; their sum is too large at first: 1.47 gradients at decay 0.9.
    """
    ahead = Average(average.value, average.weight_of_start * decay).corrected
    weight = 1 - average.weight_of_start
    return jax.tree.map(lambda m, g: decay * m + (1 - decay) * g / weight, ahead, grads)

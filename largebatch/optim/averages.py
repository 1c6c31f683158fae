"""Moving averages: of gradients in an optimizer, of parameters, of layers' statistics, of the gradient's noise."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


def mix(old, new, decay):
    """Return decay * old + (1 - decay) * new for pytrees alike."""
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)


def smooth(old, new, decay: float, count):
    """Update a moving average of `count` values with one more.

    At first it is the mean of all values, so that it never remembers where it started. For parameters see Polyak
    and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; here later ones weigh more.
    """
    return mix(old, new, jnp.minimum(decay, count / (count + 1.0)).astype(jnp.float32))


@struct.dataclass
class Average:
    """A moving average that started at zero, whose decay may change from step to step, as it does with the batch.

    It has to be divided by the weight of the values in it, which is 1 minus the product of all decays so far. optax
    takes the decay of the latest step for all of them.
    """

    value: Any  # pytree
    weight_of_start: jax.Array  # float32, the product of the decays so far

    @classmethod
    def start(cls, tree) -> "Average":
        """Create an empty moving average shaped like `tree`."""
        return cls(jax.tree.map(jnp.zeros_like, tree), jnp.ones(()))

    def add(self, new, decay) -> "Average":
        """Return the average after one more value."""
        return Average(mix(self.value, new, decay), self.weight_of_start * decay)

    @property
    def corrected(self):
        """The average of the values added, without the zero that it started from."""
        return jax.tree.map(lambda value: value / (1 - self.weight_of_start), self.value)

    def nesterov(self, new, decay):
        """Return the corrected average after the next value, for which `new`, the latest, stands.

        As in optax, both parts are corrected separately; their sum is too large at first: 1.47 times at decay 0.9.
        """
        ahead = Average(self.value, self.weight_of_start * decay).corrected
        weight = 1 - self.weight_of_start
        return jax.tree.map(lambda m, g: decay * m + (1 - decay) * g / weight, ahead, new)

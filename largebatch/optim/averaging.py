"""Moving averages."""

import jax
import jax.numpy as jnp


def smooth(old, new, decay: float, count):
    """Update a moving average of `count` values with one more: decay * old + (1 - decay) * new.

    At first it is the mean of all values, so that it never remembers where it started. For parameters see Polyak
    and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; here later ones weigh more.
    """
    decay = jnp.minimum(decay, count / (count + 1.0)).astype(jnp.float32)
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)

"""Moving averages."""

import jax
import jax.numpy as jnp


def smooth(old, new, decay: float, count):
    """A moving average that holds `count` values and gets another: decay * old + (1 - decay) * new.

    At first it is the mean of all so far, so that it never remembers where it started. Of parameters: Polyak and
    Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging", with the last ones weighing more.
    """
    decay = jnp.minimum(decay, count / (count + 1.0)).astype(jnp.float32)
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)

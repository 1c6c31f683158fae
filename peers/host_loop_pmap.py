"""How the seed system trains, timed correctly: a host loop over a pmapped step on float32 images.

Each device holds its images as float32 and evaluates the gradient of its whole share at once; the host
dispatches every update and waits for it (more than 32 queued CPU psums deadlock).
"""

import jax
import optax
from jax import lax


def make_update(apply, optimizer: optax.GradientTransformation):
    """(params, opt_state, images, labels), each with a leading device axis -> (params, opt_state).

    Args:
      apply: (params, float32 images) -> logits.
      optimizer: an optax transformation.
    """

    def loss(params, images, labels):
        logits = apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def update(params, opt_state, images, labels):
        grads = lax.pmean(jax.grad(loss)(params, images, labels), "devices")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.pmap(update, "devices", donate_argnums=(0, 1))

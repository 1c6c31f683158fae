"""Optimizers by name, as optax transformations whose learning rate is data, not code.

`optax.inject_hyperparams` keeps every hyper-parameter in the optimizer state, so the compiled program
holds none of them and serves every setting; `with_learning_rate` sets the rate of the next update.
"""

import jax
import jax.numpy as jnp
import optax

LAMB_EPSILON = 1e-6  # beside the root of the second moment


def _kernels_only(params):
    """Weight-decay mask: kernels, not biases or normalisation scales."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _sgd(learning_rate, momentum, weight_decay):
    # Decay is added to the gradient before momentum, as in Goyal et al. 2017, section 3.
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=_kernels_only),
        optax.sgd(learning_rate, momentum=momentum),
    )


def _adam(learning_rate, momentum, weight_decay):
    # Kingma and Ba 2015; with weight_decay it is AdamW (Loshchilov and Hutter 2019).
    return optax.adamw(learning_rate, b1=momentum, weight_decay=weight_decay, mask=_kernels_only)


def _lamb(learning_rate, momentum, weight_decay):
    # You et al. 2020, "Large Batch Optimization for Deep Learning".
    return optax.lamb(learning_rate, b1=momentum, eps=LAMB_EPSILON, weight_decay=weight_decay, mask=_kernels_only)


OPTIMIZERS = {"lamb": _lamb, "adam": _adam, "sgd": _sgd}


def create_optimizer(name: str, momentum: float, weight_decay: float) -> optax.GradientTransformation:
    """The optimizer called `name`, a key of OPTIMIZERS.

    Args:
      momentum: decay of the first moment (b1 of LAMB and Adam).
      weight_decay: on kernels only; decoupled from the gradient for LAMB and Adam.
    Returns:
      A transformation whose state has `hyperparams["learning_rate"]`, zero until set.
    """
    return optax.inject_hyperparams(OPTIMIZERS[name])(
        learning_rate=0.0, momentum=momentum, weight_decay=weight_decay
    )


def with_learning_rate(opt_state, learning_rate):
    """`opt_state` with the rate of the next update."""
    hyperparams = {**opt_state.hyperparams, "learning_rate": jnp.asarray(learning_rate, jnp.float32)}
    return opt_state._replace(hyperparams=hyperparams)


def trust_ratios(grads, params, weight_decay: float):
    """LAMB's trust ratio of every parameter at the first update: ||p|| / ||Adam's direction + decay * p||.

    You et al. 2020, algorithm 2. The momentum cancels, since the first moments are corrected for their bias.

    Args:
      grads, params: pytrees alike.
      weight_decay: on kernels only.
    Returns:
      A pytree alike of float32 scalars; inf where the gradient is zero, whatever the decay.
    """
    adam = optax.scale_by_adam(eps=LAMB_EPSILON)
    lamb = optax.chain(adam, optax.add_decayed_weights(weight_decay, mask=_kernels_only))
    updates, _ = lamb.update(grads, lamb.init(params), params)

    def ratio(grad, param, update):
        return jnp.where(jnp.any(grad != 0), optax.tree.norm(param) / optax.tree.norm(update), jnp.inf)

    return jax.tree.map(ratio, grads, params, updates)

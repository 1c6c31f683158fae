"""A network as one program of `jax.export` for several platforms, which needs JAX alone to run."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import export, lax

from largebatch.runs.checkpoints import named_leaves

PLATFORMS = ("cpu", "cuda", "tpu")


def serialized(
    on_cpu: Callable, elsewhere: Callable, variables: dict, image_shape: tuple[int, ...], image_dtype: str
) -> bytes:
    """Return the program (arrays by name, integer images [b, H, W, C] of any b) -> float32 [b, ...].

    Args:
      on_cpu, elsewhere: (variables, images) -> what the network gives; see `loss.make_logits_fn`.
      variables: NumPy arrays; they are arguments of the program and not in it. Names are those of `named_leaves`.
      image_shape: height, width, channels.
    """
    names, structure = list(named_leaves(variables)), jax.tree.structure(variables)

    def program(arrays, images):
        tree = jax.tree.unflatten(structure, [arrays[name] for name in names])
        with nn.intercept_methods(_keep_sums_of_head):
            return lax.platform_dependent(tree, images, cpu=on_cpu, default=elsewhere)

    shape = export.symbolic_shape(", ".join(["b", *map(str, image_shape)]))
    arrays = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named_leaves(variables).items()}
    images = jax.ShapeDtypeStruct(shape, np.dtype(image_dtype))
    with _without_places():
        return bytes(export.export(jax.jit(program), platforms=PLATFORMS)(arrays, images).serialize())


@contextlib.contextmanager
def _without_places():
    """Leave out the source file of every operation, which would name a folder on this machine."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _keep_sums_of_head(layer: Callable, arguments, options, context):
    """Apply the last layer without rounding its sums: between 4 and 8 two neighbours in bfloat16 are 0.03 apart.

    What a run sees is rounded there, so this differs from it by up to half of that; rounded too, it would now and
    then be rounded the other way, and differ by all of it.
    """
    head = context.module
    if not (isinstance(head, nn.Dense) and head.name == "head" and context.method_name == "__call__"):
        return layer(*arguments, **options)
    kernel, bias = (head.variables["params"][name].astype(head.dtype) for name in ("kernel", "bias"))
    return jnp.dot(arguments[0].astype(head.dtype), kernel, preferred_element_type=jnp.float32) + bias

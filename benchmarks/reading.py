"""bench.py reading: what reading costs in an update of the whole set on TPUs, by their compiler's cycles.

Contenders, for the 172,800 views of EuroSAT: our update with rows of uint8 that are sliced, and with rows that are
gathered, as where the noise is measured; the gradient of the network alone, on normalised images that are there
already; the step of the original system, on float32 images.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import examine
import model
from benchmarks.compile import Case
from benchmarks.peers import serve
from largebatch.config import rules
from largebatch.hardware.compiled import compile_and_look
from largebatch.hardware.targets import Target, find_target
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.training.step import sum_over_devices

TARGETS = ("v3:4x4", "v5e:4x8", "v6e:4x4")
IMAGES = 172_800


def bench_reading(targets: str | None) -> dict:
    """Compiles every contender for every target.

    Args:
      targets: names with commas between; None for TARGETS.
    """
    rows = []
    for name in targets.split(",") if targets else TARGETS:
        target = find_target(name)
        share = IMAGES // target.hardware.num_devices
        alone = _gradient_alone(target, share)
        cycles = {
            "network alone": alone,
            "ours, gathered, 4 micro-batches": _ours(target, share // 4, noise_every=10),
            "ours, sliced, 4 micro-batches": _ours(target, share // 4),
            "ours, gathered, auto": _ours(target, "auto", noise_every=10),
            "ours, sliced, auto": _ours(target, "auto"),
            "the seed's step, bfloat16": _seed_step(target, share, "bfloat16"),
            "the seed's step, float32": _seed_step(target, share, "float32"),
        }
        for contender, count in cycles.items():
            row = {"target": name, "contender": contender, "cycles": count, "ratio": count / alone}
            rows.append(row)
            print(
                f"{name:8} {contender:34} {count / 1e6:6.2f} M cycles, {row['ratio']:.3f} of the network alone",
                flush=True,
            )
    return {"rows": rows}


def print_reading(result: dict) -> None:
    """Everything was printed on the way."""
    print(f"{len(result['rows'])} programs compiled")


def _ours(target: Target, micro_batch_size: int | str, noise_every: int = 0) -> float:
    config = Case("eurosat_seed").load()
    config.model.dtype, config.augment.storage = "bfloat16", "expanded"
    config.batch.micro_batch_size, config.log.noise_every = micro_batch_size, noise_every
    jax.clear_caches()
    return examine.compile_for(rules.check(config.to_dict(), model.MODELS), target).programs["update"].cycles


def _network(dtype: str):
    network = model.create_model("convnet", serve.NUM_CLASSES, dtype, "lax")
    params = jax.eval_shape(lambda: model.init_variables(network, serve.IMAGE_SHAPE, 0)[0])
    return network, params


def _mean_loss(network, params, images, labels):
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _cycles(function, target: Target, *arguments) -> float:
    num_devices = target.hardware.num_devices
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_devices, *x.shape), x.dtype), arguments)
    return compile_and_look(
        pmap(function, devices=target.devices).lower(*shapes), {}, target.hardware.platform
    ).cycles


def _gradient_alone(target: Target, share: int) -> float:
    """The gradient of a device's share, summed over devices."""
    network, params = _network("bfloat16")

    def gradient(params, images, labels):
        return sum_over_devices(jax.grad(_mean_loss, argnums=1)(network, params, images, labels))

    images = jax.ShapeDtypeStruct((share, *serve.IMAGE_SHAPE), jnp.bfloat16)
    return _cycles(gradient, target, params, images, jax.ShapeDtypeStruct((share,), np.int32))


def _seed_step(target: Target, share: int, dtype: str) -> float:
    """An update of the original system: the whole share at once, on normalised float32 images."""
    network, params = _network(dtype)
    optimizer = optax.adam(serve.LEARNING_RATE)

    def step(params, opt_state, images, labels):
        grads = lax.pmean(jax.grad(_mean_loss, argnums=1)(network, params, images, labels), AXIS)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(optimizer.init, params)
    images = jax.ShapeDtypeStruct((share, *serve.IMAGE_SHAPE), np.float32)
    return _cycles(step, target, params, opt_state, images, jax.ShapeDtypeStruct((share,), np.int32))

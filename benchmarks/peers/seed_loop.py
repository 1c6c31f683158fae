"""How the seed system trains, timed correctly: a host loop over a pmapped step on resident float32 images.

    python -m benchmarks.peers.seed_loop --batch_size 512

Each device evaluates the gradient of its whole share at once; the host dispatches every update and waits
for it (more than 32 queued CPU psums deadlock). With --micro_batch_size it accumulates instead, one
dispatch per micro-batch, which the seed system does not do: that is for a comparison at its best.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import model as models
from benchmarks.peers import pmapped, serve


def build(options: dict) -> serve.Step:
    """A step; micro_batch_size (per device) 0 is the whole share, devices 0 is all."""
    devices, count, micro_batch_size = pmapped.split(options)
    network = models.create_model("convnet", serve.NUM_CLASSES, options["dtype"], "lax")
    optimizer = optax.adam(serve.LEARNING_RATE)

    def loss(params, images, labels):
        logits = network.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def apply(params, opt_state, grads):
        updates, opt_state = optimizer.update(lax.pmean(grads, "devices"), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def update(params, opt_state, images, labels):
        return apply(params, opt_state, jax.grad(loss)(params, images[0], labels[0]))

    def accumulate(params, total, images, labels, index):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, images[index], labels[index]))

    def finish(params, opt_state, total):
        return apply(params, opt_state, jax.tree.map(lambda x: x / count, total)), jax.tree.map(
            jnp.zeros_like, total
        )

    def on_devices(function, **keywords):
        return jax.pmap(function, "devices", devices=devices, **keywords)

    whole = on_devices(update, donate_argnums=(0, 1))
    add = on_devices(accumulate, in_axes=(0, 0, 0, 0, None), donate_argnums=1)
    end = on_devices(finish, donate_argnums=(0, 1, 2))

    images, labels = serve.random_images()
    chosen = next(serve.batches(options["batch_size"])).reshape(len(devices), count, micro_batch_size)
    normalised = (images[chosen].astype(np.float32) - serve.MEAN) / serve.STD
    images, labels = on_devices(lambda *x: x)(normalised, labels[chosen])
    params = network.init(jax.random.key(0), jnp.zeros((1, *serve.IMAGE_SHAPE)))["params"]
    held = [pmapped.replicate(params, devices), pmapped.replicate(optimizer.init(params), devices)]
    total = pmapped.replicate(jax.tree.map(np.zeros_like, params), devices)

    def run(rounds):
        nonlocal total
        for _ in range(rounds):
            if count == 1:
                held[:] = whole(*held, images, labels)
            else:
                for index in range(count):
                    total = add(held[0], total, images, labels, index)
                held[:], total = end(*held, total)
            jax.block_until_ready(held)

    return serve.Step(
        run,
        lambda: int(pmapped.replica(optax.tree.get(held[1], "count"))),
        lambda: [pmapped.replica(x) for x in jax.tree.leaves(held[0])],
    )


if __name__ == "__main__":
    serve.main(build, pmapped.DEFAULTS)

"""A training loop in the manner of flax's ImageNet example: a host input pipeline, a dispatch per step.

    python -m benchmarks.peers.flax_loop --batch_size 512 --micro_batch_size 32

The host picks the images of each step, normalises them to float32 and sends them to the devices, while
they work on the step before; a pmapped train_step on a flax TrainState does the rest. With
--micro_batch_size gradients are accumulated over several dispatches, as users add to that example.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax import lax

import model as models
from benchmarks.peers import pmapped, serve


def build(options: dict) -> serve.Step:
    """A step; micro_batch_size (per device) 0 is the whole share, devices 0 is all."""
    devices, count, micro_batch_size = pmapped.split(options)
    network = models.create_model("convnet", serve.NUM_CLASSES, options["dtype"], "lax")

    def grads_of(params, batch):
        def loss_fn(params):
            logits = network.apply({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        return jax.grad(loss_fn)(params)

    def train_step(state, batch):
        return state.apply_gradients(grads=lax.pmean(grads_of(state.params, batch), "batch"))

    def accumulate(state, total, batch):
        return jax.tree.map(jnp.add, total, grads_of(state.params, batch))

    def finish(state, total):
        grads = jax.tree.map(lambda x: x / count, lax.pmean(total, "batch"))
        return state.apply_gradients(grads=grads), jax.tree.map(jnp.zeros_like, total)

    def on_devices(function, **keywords):
        return jax.pmap(function, "batch", devices=devices, **keywords)

    step, add = on_devices(train_step, donate_argnums=0), on_devices(accumulate, donate_argnums=1)
    end = on_devices(finish, donate_argnums=(0, 1))

    def pipeline():
        images, labels = serve.random_images()
        for chosen in serve.batches(options["batch_size"]):
            for part in chosen.reshape(count, len(devices), micro_batch_size):
                normalised = (images[part].astype(np.float32) - serve.MEAN) / serve.STD
                yield {"image": normalised, "label": labels[part]}

    params = network.init(jax.random.key(0), jnp.zeros((1, *serve.IMAGE_SHAPE)))["params"]
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(serve.LEARNING_RATE))
    state = pmapped.replicate(state, devices)
    total = pmapped.replicate(jax.tree.map(np.zeros_like, params), devices)
    batches = pipeline()

    def run(rounds):
        nonlocal state, total
        before = None
        for _ in range(rounds * count):
            batch = next(batches)  # made while the devices work on the step before
            jax.block_until_ready(before)
            if count == 1:
                before = state = step(state, batch)
            else:
                before = total = add(state, total, batch)
                run.done += 1
                if run.done % count == 0:
                    state, total = end(state, total)
                    before = (state, total)
        jax.block_until_ready((state, total))

    run.done = 0

    return serve.Step(
        run,
        lambda: int(pmapped.replica(state.step)),
        lambda: [pmapped.replica(x) for x in jax.tree.leaves(state.params)],
    )


if __name__ == "__main__":
    serve.main(build, pmapped.DEFAULTS)

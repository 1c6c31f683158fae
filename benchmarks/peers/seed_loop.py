"""How the seed system trains, timed correctly: a host loop over a pmapped step on resident float32 images.

    python -m benchmarks.peers.seed_loop --batch_size 512

Each device evaluates the gradient of its whole share at once; the host dispatches every update and waits
for it (more than 32 queued CPU psums deadlock). With --micro_batch_size it accumulates instead, one
dispatch per micro-batch, which the seed system does not do: that is for a comparison at its best.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import model
from benchmarks.peers import pmapped, serve


class SeedLoop(serve.Step):
    """The seed's loop; options as in `pmapped.DEFAULTS`."""

    def __init__(self, options: dict):
        split = pmapped.split_batch(options)
        self._num_micro_batches = split.num_micro_batches
        self._network = model.create_model("convnet", serve.NUM_CLASSES, options["dtype"], "lax")
        self._optimizer = optax.adam(serve.LEARNING_RATE)

        pmap = functools.partial(jax.pmap, axis_name="devices", devices=split.devices)
        self._update = pmap(self._update_fn, donate_argnums=(0, 1))
        self._accumulate = pmap(self._accumulate_fn, in_axes=(0, 0, 0, 0, None), donate_argnums=1)
        self._finish = pmap(self._finish_fn, donate_argnums=(0, 1, 2))

        images, labels = serve.random_images()
        batch = next(serve.batches(options["batch_size"]))
        batch = batch.reshape(len(split.devices), split.num_micro_batches, split.micro_batch_size)
        self._images, self._labels = pmap(lambda *x: x)(serve.normalise(images[batch]), labels[batch])
        params = self._network.init(jax.random.key(0), jnp.zeros((1, *serve.IMAGE_SHAPE)))["params"]
        self._params = pmapped.replicate(params, split.devices)
        self._opt_state = pmapped.replicate(self._optimizer.init(params), split.devices)
        self._grads = pmapped.replicate(jax.tree.map(np.zeros_like, params), split.devices)

    # ---- on the devices ----

    def _loss(self, params, images, labels):
        logits = self._network.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def _apply_gradients(self, params, opt_state, grads):
        updates, opt_state = self._optimizer.update(lax.pmean(grads, "devices"), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def _update_fn(self, params, opt_state, images, labels):
        return self._apply_gradients(params, opt_state, jax.grad(self._loss)(params, images[0], labels[0]))

    def _accumulate_fn(self, params, grads, images, labels, index):
        return jax.tree.map(jnp.add, grads, jax.grad(self._loss)(params, images[index], labels[index]))

    def _finish_fn(self, params, opt_state, grads):
        mean = jax.tree.map(lambda x: x / self._num_micro_batches, grads)
        params, opt_state = self._apply_gradients(params, opt_state, mean)
        return params, opt_state, jax.tree.map(jnp.zeros_like, grads)

    # ---- on the host ----

    def run(self, updates: int) -> None:
        """See `serve.Step`."""
        for _ in range(updates):
            if self._num_micro_batches == 1:
                self._params, self._opt_state = self._update(
                    self._params, self._opt_state, self._images, self._labels
                )
            else:
                for index in range(self._num_micro_batches):
                    self._grads = self._accumulate(self._params, self._grads, self._images, self._labels, index)
                self._params, self._opt_state, self._grads = self._finish(
                    self._params, self._opt_state, self._grads
                )
            jax.block_until_ready((self._params, self._opt_state))

    def updates(self) -> int:
        """See `serve.Step`."""
        return int(pmapped.first_replica(optax.tree.get(self._opt_state, "count")))

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return [pmapped.first_replica(x) for x in jax.tree.leaves(self._params)]


if __name__ == "__main__":
    serve.main(SeedLoop, pmapped.DEFAULTS)

"""A training loop in the manner of flax's ImageNet example: a host input pipeline, a dispatch per step.

    python -m benchmarks.peers.flax_loop --batch_size 512 --micro_batch_size 32

The host picks the images of each step, normalises them to float32 and sends them to the devices, while
they work on the step before; a pmapped train_step on a flax TrainState does the rest. With
--micro_batch_size gradients are accumulated over several dispatches, as users add to that example.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax import lax

import model
from benchmarks.peers import pmapped, serve


class FlaxLoop(serve.Step):
    """The loop of flax's example; options as in `pmapped.DEFAULTS`."""

    def __init__(self, options: dict):
        self._split = pmapped.split_batch(options)
        self._network = model.create_model("convnet", serve.NUM_CLASSES, options["dtype"], "lax")

        pmap = functools.partial(jax.pmap, axis_name="batch", devices=self._split.devices)
        self._train_step = pmap(self._train_step_fn, donate_argnums=0)
        self._accumulate = pmap(self._accumulate_fn, donate_argnums=1)
        self._finish = pmap(self._finish_fn, donate_argnums=(0, 1))

        params = self._network.init(jax.random.key(0), jnp.zeros((1, *serve.IMAGE_SHAPE)))["params"]
        adam = optax.adam(serve.LEARNING_RATE)
        state = train_state.TrainState.create(apply_fn=None, params=params, tx=adam)
        self._state = pmapped.replicate(state, self._split.devices)
        self._grads = pmapped.replicate(jax.tree.map(np.zeros_like, params), self._split.devices)
        self._batches = self._make_batches(options["batch_size"])

    # ---- on the devices ----

    def _gradients(self, params, batch):
        def loss_fn(params):
            logits = self._network.apply({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        return jax.grad(loss_fn)(params)

    def _train_step_fn(self, state, batch):
        return state.apply_gradients(grads=lax.pmean(self._gradients(state.params, batch), "batch"))

    def _accumulate_fn(self, state, grads, batch):
        return jax.tree.map(jnp.add, grads, self._gradients(state.params, batch))

    def _finish_fn(self, state, grads):
        mean = jax.tree.map(lambda x: x / self._split.num_micro_batches, lax.pmean(grads, "batch"))
        return state.apply_gradients(grads=mean), jax.tree.map(jnp.zeros_like, grads)

    # ---- on the host ----

    def _make_batches(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Endless micro-batches of all devices, each [devices, micro-batch size, ...]."""
        split, (images, labels) = self._split, serve.random_images()
        for batch in serve.batches(batch_size):
            for part in batch.reshape(split.num_micro_batches, len(split.devices), split.micro_batch_size):
                yield {"image": serve.normalise(images[part]), "label": labels[part]}

    def run(self, updates: int) -> None:
        """See `serve.Step`."""
        last_result = None
        for _ in range(updates):
            for index in range(self._split.num_micro_batches):
                batch = next(self._batches)  # made while the devices work on the step before
                jax.block_until_ready(last_result)
                last_result = self._dispatch(batch, ends_update=index == self._split.num_micro_batches - 1)
        jax.block_until_ready((self._state, self._grads))

    def _dispatch(self, batch: dict, *, ends_update: bool):
        """Starts the work on a micro-batch; returns what it will give."""
        if self._split.num_micro_batches == 1:
            self._state = self._train_step(self._state, batch)
            return self._state
        self._grads = self._accumulate(self._state, self._grads, batch)
        if ends_update:
            self._state, self._grads = self._finish(self._state, self._grads)
        return self._state, self._grads

    def updates(self) -> int:
        """See `serve.Step`."""
        return int(pmapped.first_replica(self._state.step))

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return [pmapped.first_replica(x) for x in jax.tree.leaves(self._state.params)]


if __name__ == "__main__":
    serve.main(FlaxLoop, pmapped.DEFAULTS)

"""The loop of minimal.py, a step a call, beside which ours is timed.

python -m benchmarks.peers.minimal_loop --batch_size 512
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minimal
from benchmarks.peers import pmapped, serve


class MinimalLoop(serve.Step):
    """minimal.py's inner loop; options as in `pmapped.DEFAULTS`."""

    def __init__(self, options: dict):
        split, batch_size = pmapped.split_batch(options), options["batch_size"]
        mean, std = np.full(3, serve.MEAN), np.full(3, serve.STD)
        network = minimal.ConvNet(serve.NUM_CLASSES, serve.IMAGE_SHAPE, mean, std, options["dtype"])
        optimizer = optax.adam(serve.LEARNING_RATE)
        images, labels = serve.random_images()
        repeats = -(-batch_size // len(images))  # of a batch that is larger than the set
        self._shards = minimal.shard(np.tile(images, (repeats, 1, 1, 1)), np.tile(labels, repeats), split.devices)
        params = network.init(jax.random.key(0), jnp.asarray(images[:1]))["params"]
        self._state = pmapped.replicate((params, optimizer.init(params)), split.devices)
        self._inner_loop = minimal.make_inner_loop(
            network, optimizer, split.devices, batch_size, split.micro_batch_size, inner_steps=1
        )
        self._updates = 0

    def run(self, updates: int) -> None:
        """See `serve.Step`."""
        for _ in range(updates):
            *self._state, _ = self._inner_loop(
                *self._state, self._shards, np.int32(self._updates), jax.random.key(0)
            )
            jax.block_until_ready(self._state)  # more than 32 queued psums deadlock on a CPU
            self._updates += 1

    def updates(self) -> int:
        """See `serve.Step`."""
        return int(pmapped.first_replica(optax.tree.get(self._state[1], "count")))

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return [pmapped.first_replica(x) for x in jax.tree.leaves(self._state[0])]


if __name__ == "__main__":
    serve.main(MinimalLoop, pmapped.DEFAULTS)

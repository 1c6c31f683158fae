"""The loop of minimal.py, the plain way, a step a call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minimal
from benchmarks import timing
from largebatch.hosts.replicas import first_replica


class MinimalLoop:
    """The inner loop of minimal.py with Adam.

    Options are "batch_size", "dtype" (float32), "devices" (all), and "micro_batch_size" of a device (its share).
    """

    def __init__(self, options: dict):
        devices, batch_size = jax.local_devices()[: options.get("devices")], options["batch_size"]
        mean, std = np.full(3, timing.MEAN), np.full(3, timing.STD)
        dtype = options.get("dtype", "float32")
        network = minimal.ConvNet(timing.NUM_CLASSES, timing.IMAGE_SHAPE, mean, std, dtype)
        optimizer = optax.adam(timing.LEARNING_RATE)
        images, labels = timing.random_images()
        repeats = -(-batch_size // len(images))  # for a batch that is larger than the set
        self._shards = minimal.shard(np.tile(images, (repeats, 1, 1, 1)), np.tile(labels, repeats), devices)
        params = network.init(jax.random.key(0), jnp.asarray(images[:1]))["params"]
        replicas = jax.tree.map(lambda x: np.stack([x] * len(devices)), (params, optimizer.init(params)))
        self._state, self._steps = minimal.place(replicas, devices), 0
        size = options.get("micro_batch_size") or batch_size // len(devices)
        self._inner_loop = minimal.make_inner_loop(network, optimizer, devices, batch_size, size, inner_steps=1)

    def run(self, count: int) -> None:
        """Do so many steps, waiting for each: more than 32 queued psums deadlock on a CPU."""
        for _ in range(count):
            *self._state, _ = self._inner_loop(*self._state, self._shards, np.int32(self._steps), jax.random.key(0))
            jax.block_until_ready(self._state)
            self._steps += 1

    def steps(self) -> int:
        """Return the number of steps so far, by the optimizer."""
        return int(first_replica(optax.tree.get(self._state[1], "count")))

    def params(self) -> list[np.ndarray]:
        """Return all parameters."""
        return jax.tree.leaves(first_replica(self._state[0]))


build = MinimalLoop

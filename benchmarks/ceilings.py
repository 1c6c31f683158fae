"""The ceilings of the machine: its arithmetic and its memory, as two contenders that do nothing else."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.serve import Progress
from benchmarks.timing import Contender
from largebatch.hosts import replicas

MATMUL_SIZE = 2048
COPY_BYTES = 2**28
LOOKED_AT = 4096  # numbers of the first device


class Ceiling:
    """x <- function(x, operand) on every device at once; arrays have a leading device axis."""

    def __init__(self, function: Callable, start: np.ndarray, operand: np.ndarray):
        self._advance = replicas.pmap(function, donate_argnums=(0,))
        to_devices = replicas.pmap(lambda x: x)
        self._x, self._operand = to_devices(start), to_devices(operand)
        self._rounds = 0

    def run(self, rounds: int) -> None:
        """See `timing.Work`."""
        for _ in range(rounds):
            self._x = jax.block_until_ready(self._advance(self._x, self._operand))
            self._rounds += 1

    def progress(self) -> Progress:
        """See `timing.Work`."""
        numbers = np.asarray(self._x.addressable_shards[0].data).ravel()[:LOOKED_AT]
        return Progress(self._rounds, [[float(numbers.sum()), float(np.abs(numbers).sum())]])


def matmul_ceiling(dtype: str) -> Contender:
    """A large matrix product on every device at once, x <- x @ a; its rate is the arithmetic ceiling."""
    count, size = jax.local_device_count(), MATMUL_SIZE
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, size, size), np.float32)
    # Scaled so that the product neither grows nor fades; x is float32 outside the product.
    a = rng.standard_normal((count, size, size), np.float32) / np.sqrt(size)

    def product(x, a):
        return jax.lax.dot(x.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)

    return Contender(f"matrix product, {dtype}", Ceiling(product, x, a), flops=2.0 * size**3 * count)


def copy_ceiling() -> Contender:
    """Reads and writes a large array on every device at once, x <- x + a; its rate is the memory ceiling."""
    count, size = jax.local_device_count(), COPY_BYTES // 4
    x = np.zeros((count, size // count), np.float32)
    a = np.ones((count, 1), np.float32)
    return Contender("memory copy", Ceiling(jnp.add, x, a), bytes=2.0 * x.nbytes)

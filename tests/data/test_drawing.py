"""The cost of finding an image in the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np

from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hardware.compiled import parse
from largebatch.tasks.task import Classification
from largebatch.training.step import MicroBatchReader
from largebatch.training.views import make_read

SHARDING, SIZE, SHAPE = DataSharding(480, 480, 1, 8), 16, (32, 32, 3)


def test_an_example_is_found_once_and_not_for_every_pixel():
    """The compiler fused all rounds of the shuffle into the views of the images: a fifth of the speed."""
    read = make_read("on_device", SHAPE, SHARDING.views, Classification(2))
    reader = MicroBatchReader(read, SHARDING, Grouping(SIZE, SIZE))
    images = jnp.zeros((SHARDING.num_originals, np.prod(SHAPE)), jnp.uint8)
    shard = {"images": images, "labels": jnp.zeros(SHARDING.num_originals, jnp.int32)}

    def add_images(batch_size):
        batch = batching.device_batch(SHARDING, 0, 0, 0, batch_size)
        zeros = jnp.zeros((SIZE, *SHAPE))
        return reader.sum_over(lambda found: jnp.tanh(found.images.astype(jnp.float32)), zeros, shard, batch, 0)

    program = parse(jax.jit(add_images).lower(64).compile().as_text())
    fusions = [one for one in program.instructions() if one.opcode == "fusion"]
    of_pixels = [one for one in fusions if one.output_bytes >= SIZE * np.prod(SHAPE)]
    lengths = {one.name: len(program.computations[one.attributes["calls"]]) for one in fusions}
    a_round = 10  # operations, at least
    assert of_pixels
    assert max(lengths.values()) > a_round * batching.SHUFFLE_ROUNDS  # the shuffle is somewhere
    assert max(lengths[one.name] for one in of_pixels) < a_round * batching.SHUFFLE_ROUNDS

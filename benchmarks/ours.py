"""Our inner loop as a contender, and the ceilings of the machine that it is held against."""

import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import augment
import model as models
from benchmarks.peers import serve
from benchmarks.timing import MAX_ROUNDS, Contender
from largebatch.data import batching
from largebatch.hosts import replicas
from largebatch.hosts.start import start_jax
from largebatch.optim.optimizers import create_optimizer
from largebatch.training.loss import make_loss_fn
from largebatch.training.state import count_params, create_state
from largebatch.training.step import Batch, Plan, Step, make_inner_loop

MATMUL_SIZE = 2048
COPY_BYTES = 2**28


class OurStep:
    """The compiled inner loop on random images that lie on the devices, beside the peers' options.

    Options: batch_size (may be changed by hand afterwards), micro_batch_size, dtype, conv, storage, noise_decay.
    """

    packed = False

    def __init__(self, options: dict):
        self.batch_size, self.updates = options["batch_size"], 0
        self.network = models.create_model("convnet", serve.NUM_CLASSES, options["dtype"], options["conv"])
        optimizer = create_optimizer("adam")
        params, model_state = models.init_variables(self.network, serve.IMAGE_SHAPE, 0)
        storage = options.get("storage", "expanded")
        originals = -(-max(self.batch_size, serve.NUM_IMAGES) // augment.NUM_VIEWS)
        self.deal = batching.Deal(originals, 1 if self.packed else jax.device_count(), augment.NUM_VIEWS)
        self.shards = _random_shards(self.deal, storage)
        step = Step(
            make_loss_fn(self.network, serve.IMAGE_SHAPE, (serve.MEAN,) * 3, (serve.STD,) * 3),
            optimizer,
            augment.make_read(storage, serve.IMAGE_SHAPE),
            self.deal,
            options["micro_batch_size"],
            noise_decay=options.get("noise_decay", Step._field_defaults["noise_decay"]),
            packed=self.packed,
        )
        self.inner_loop = make_inner_loop(step)
        self.state = replicas.replicate(create_state(params, optimizer, 0, model_state))

    def plan(self) -> Plan:
        """Inputs of the next updates."""
        steps = np.arange(self.updates, self.updates + MAX_ROUNDS, dtype=np.int64) * self.batch_size
        return Plan(
            *batching.epoch_and_offset(self.deal, steps),
            np.full(MAX_ROUNDS, self.batch_size, np.int32),
            np.full(MAX_ROUNDS, serve.LEARNING_RATE, np.float32),
        )

    def run(self, rounds: int) -> None:
        """Does `rounds` updates in one call and waits for them."""
        self.state, values = self.inner_loop(self.state, self.shards, self.plan(), np.int32(rounds))
        jax.block_until_ready((self.state, values))
        self.updates += rounds

    def step(self) -> serve.Step:
        """As the peers have it."""
        return serve.Step(
            self.run,
            lambda: int(replicas.first_replica(self.state.step)),
            lambda: jax.tree.leaves(replicas.first_replica(self.state.params)),
            lambda: {
                "collectives": collectives(self.compiled().as_text()),
                "params": count_params(self.one_state().params),
            },
        )

    def one_state(self):
        """Shapes and dtypes of one replica's state."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.state)

    def shard_bytes(self) -> int:
        """Images and labels on one device."""
        return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self.shards))

    def bytes_per_device(self) -> int:
        """Images, parameters and optimizer state on one device."""
        return self.shard_bytes() + sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self.state))

    def compiled(self):
        """The compiled inner loop, for its text and memory; of one host."""
        return self.inner_loop.lower(self.state, self.shards, self.plan(), np.int32(0)).compile()


def collectives(text: str) -> list[dict]:
    """Every collective of a compiled program: its kind and the bytes that one device puts in."""
    found = []
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    for shapes, kind in re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", text):
        sizes = [
            int(bits) // 8 * math.prod(map(int, filter(None, dims.split(","))))
            for bits, dims in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shapes)
        ]
        found.append({"kind": kind, "bytes": sum(sizes)})
    return found


def _random_shards(deal: batching.Deal, storage: str):
    views = augment.NUM_VIEWS if storage == "expanded" else 1
    rows, image = deal.max_originals * views, int(np.prod(serve.IMAGE_SHAPE))
    shards = []
    for index, device in enumerate(jax.local_devices()):
        rng = np.random.default_rng(index)
        shard = {
            "images": rng.integers(0, 256, (1, rows, image), np.uint8),
            "labels": rng.integers(0, serve.NUM_CLASSES, (1, deal.max_originals), np.int32),
        }
        shards.append(jax.device_put(shard, device))
    return replicas.stack(shards)


def our_step(name: str, options: dict) -> Contender:
    """`OurStep` as a contender."""
    ours = OurStep(options)
    step = ours.step()
    size = ours.bytes_per_device()
    return Contender(name, step.run, lambda: serve.digest(step), options["batch_size"], bytes_per_device=size)


def count_by_xla(dtype: str, conv: str, micro_batch_size: int) -> dict[str, float]:
    """FLOPs and bytes per image of one compiled micro-batch gradient, as XLA's cost analysis has them.

    Of a loop XLA counts one turn, so the gradient is compiled by itself. On CPU it knows nothing of what
    goes on in library calls: the counts are then too low.
    """
    network = models.create_model("convnet", serve.NUM_CLASSES, dtype, conv)
    params, model_state = models.init_variables(network, serve.IMAGE_SHAPE, 0)
    loss_fn = make_loss_fn(network, serve.IMAGE_SHAPE, (serve.MEAN,) * 3, (serve.STD,) * 3)
    size, image = micro_batch_size, int(np.prod(serve.IMAGE_SHAPE))
    batch = Batch(
        jax.ShapeDtypeStruct((size, image), jnp.uint8),
        jax.ShapeDtypeStruct((size,), jnp.int32),
        jax.ShapeDtypeStruct((size,), jnp.float32),
    )
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    costs = gradient.lower(params, model_state, batch).compile().cost_analysis()
    return {"flops": costs.get("flops", 0.0) / size, "bytes": costs.get("bytes accessed", 0.0) / size}


def matmul_ceiling(dtype: str) -> Contender:
    """A large matrix product on every device at once, x <- x @ a; its rate is the arithmetic ceiling."""
    count, size = jax.local_device_count(), MATMUL_SIZE
    rng = np.random.default_rng(0)
    start = rng.standard_normal((count, size, size), np.float32)
    # Scaled so that the product neither grows nor fades; x is float32 outside the product.
    factor = rng.standard_normal((count, size, size), np.float32) / np.sqrt(size)

    def product(x, a):
        return jax.lax.dot(x.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)

    return _ceiling(f"matrix product, {dtype}", product, start, factor, flops=2.0 * size**3 * count)


def copy_ceiling() -> Contender:
    """Reads and writes a large array on every device at once, x <- x + a; its rate is the memory ceiling."""
    count, size = jax.local_device_count(), COPY_BYTES // 4
    start = np.zeros((count, size // count), np.float32)
    return _ceiling("memory copy", jnp.add, start, np.ones((count, 1), np.float32), moved=2.0 * start.nbytes)


def _ceiling(name, function: Callable, start, other, flops=0.0, moved=0.0) -> Contender:
    advance = jax.pmap(function, replicas.AXIS, donate_argnums=0)
    held = {"x": jax.pmap(lambda x: x)(start), "rounds": 0}
    other = jax.pmap(lambda x: x)(other)

    def run(rounds):
        for _ in range(rounds):
            held["x"] = jax.block_until_ready(advance(held["x"], other))
            held["rounds"] += 1

    def look():
        some = np.asarray(held["x"].addressable_shards[0].data).ravel()[:4096]
        return {"updates": held["rounds"], "sums": [[float(some.sum()), float(np.abs(some).sum())]]}

    return Contender(name, run, look, flops=flops, bytes=moved)


def build(options: dict) -> serve.Step:
    """`OurStep` in a child process, with the automatic convolution."""
    start_jax()
    options = options | {"conv": models.resolve_conv("auto", jax.default_backend())}
    return OurStep(options).step()


if __name__ == "__main__":
    serve.main(build, {"batch_size": 512, "micro_batch_size": 16, "dtype": "bfloat16"})

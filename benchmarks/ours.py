"""Our inner loop as a contender, on random images that lie on the devices."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import augment
import model
from benchmarks.peers import serve
from benchmarks.timing import MAX_ROUNDS, Contender
from configs import default
from largebatch.cache.plan import make_layout
from largebatch.data.batching import DataSharding
from largebatch.hardware import hlo
from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.start import start_jax
from largebatch.optim.piecewise import PiecewiseConstant
from largebatch.optim.schedules import UpdateInputs
from largebatch.tasks.classification import Classification
from largebatch.training.loss import Batch, make_loss_fn
from largebatch.training.setup import DataFacts, Setup
from largebatch.training.state import count_params
from largebatch.training.step import make_inner_loop
from resolve import make_parts, resolve_setup


@dataclass(frozen=True)
class StepOptions:
    """What our step is built with; micro_batch_size is per device, conv a key of CONVS."""

    batch_size: int
    micro_batch_size: int | str
    dtype: str
    conv: str
    storage: str = "expanded"
    measure_noise: bool = True


def auto_conv() -> str:
    """The convolution that train.py takes by itself."""
    return model.resolve_conv("auto", jax.default_backend())


def auto_options(batch_size: int, dtype: str, *, num_devices: int) -> StepOptions:
    """What train.py takes by itself for a batch that is shared by so many devices."""
    options = StepOptions(batch_size, "auto", dtype, auto_conv())
    return dataclasses.replace(
        options, micro_batch_size=_resolve_setup(options, Hardware.here(num_devices)).micro_batch_size
    )


def make_network(dtype: str, conv: str):
    """The network of every contender."""
    return model.create_model("convnet", serve.NUM_CLASSES, dtype, conv)


def make_loss(network) -> Callable:
    """The loss on the images of every contender."""
    return make_loss_fn(
        network, serve.IMAGE_SHAPE, (serve.MEAN,) * 3, (serve.STD,) * 3, Classification(serve.NUM_CLASSES)
    )


class OurStep(serve.Step):
    """The compiled inner loop. Its `batch_size` may be changed between runs: it is not compiled in."""

    packed = False

    def __init__(self, options: StepOptions):
        self.batch_size = options.batch_size
        self._next_update = 0
        self._setup = _resolve_setup(options, Hardware.here(1 if self.packed else None), packed=self.packed)
        parts = make_parts(self._setup.program)
        step = parts.step
        if not options.measure_noise:
            step = dataclasses.replace(step, noise_decay=None)
        self.network = parts.network
        self._data = _random_data(self._setup.program.sharding, options.storage)
        self._inner_loop = make_inner_loop(step)
        self._state = replicas.replicate(parts.init(np.uint32(0), self._setup.hyperparams, None))

    def _inputs(self) -> UpdateInputs:
        """Inputs of the next updates."""
        schedule = self._setup.with_batch_sizes(PiecewiseConstant.constant(self.batch_size)).schedule
        return schedule.inputs(self._next_update, MAX_ROUNDS)

    def _count(self, updates: int):
        """How many updates a call does, as the inner loop takes it."""
        return np.int32(updates)

    def run(self, updates: int) -> None:
        """Does so many updates in one call and waits for them."""
        self._state, values = self._inner_loop(self._state, self._data, self._inputs(), self._count(updates))
        jax.block_until_ready((self._state, values))
        self._next_update += updates

    def updates(self) -> int:
        """See `serve.Step`."""
        return int(replicas.first_replica(self._state.step))

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return jax.tree.leaves(replicas.first_replica(self._state.params))

    def facts(self) -> dict:
        """The collectives of the compiled program, and the number of parameters."""
        return {
            "collectives": collectives(self.compiled().as_text()),
            "params": count_params(self.state_shapes().params),
        }

    def state_shapes(self):
        """Shapes and dtypes of one replica's state."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._state)

    def data_bytes(self) -> int:
        """Images and labels on one device."""
        return _bytes_per_device(self._data)

    def bytes_per_device(self) -> int:
        """Images, parameters and optimizer state on one device."""
        return _bytes_per_device(self._data) + _bytes_per_device(self._state)

    def compiled(self):
        """The compiled inner loop, for its text and memory; of one host."""
        return self._inner_loop.lower(self._state, self._data, self._inputs(), self._count(0)).compile()


class PackedStep(OurStep):
    """As many trials as devices, each on all images and on a device of its own."""

    packed = True

    def _inputs(self) -> UpdateInputs:
        """Inputs of the next updates of each trial."""
        return jax.tree.map(lambda x: np.stack([x] * jax.local_device_count()), super()._inputs())

    def _count(self, updates: int):
        return np.full(jax.local_device_count(), updates, np.int32)


def _resolve_setup(options: StepOptions, hardware: Hardware, *, packed: bool = False) -> Setup:
    """What train.py makes of a config with these options, on images of the shape that all contenders have."""
    config = default.get_config()
    config.batch.size, config.batch.micro_batch_size = options.batch_size, options.micro_batch_size
    config.model.name, config.model.dtype, config.model.conv = "convnet", options.dtype, options.conv
    config.optimizer.name, config.optimizer.learning_rate = "adam", serve.LEARNING_RATE
    config.augment.storage = options.storage
    views = augment.VIEW_COUNTS[config.augment.views]
    num_originals = -(-max(options.batch_size, serve.NUM_IMAGES) // views)
    counts = {"train": num_originals, "val": 0, "test": 0}
    layout = make_layout(counts, serve.IMAGE_SHAPE, np.dtype(np.uint8))
    data = DataFacts(num_originals, layout, serve.NUM_CLASSES, mean=(serve.MEAN,) * 3, std=(serve.STD,) * 3)
    return resolve_setup(config, data, hardware, packed=packed)


def _random_data(sharding: DataSharding, storage: str):
    views = sharding.views if storage == "expanded" else 1
    rows, image_size = sharding.max_originals * views, math.prod(serve.IMAGE_SHAPE)
    shards = []
    for index, device in enumerate(jax.local_devices()):
        rng = np.random.default_rng(index)
        shard = {
            "images": rng.integers(0, 256, (1, rows, image_size), np.uint8),
            "labels": rng.integers(0, serve.NUM_CLASSES, (1, sharding.max_originals), np.int32),
        }
        shards.append(jax.device_put(shard, device))
    return replicas.stack(shards)


def _bytes_per_device(tree) -> int:
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(tree))


def our_step(name: str, options: StepOptions) -> Contender:
    """`OurStep` as a contender."""
    step = OurStep(options)
    return Contender(name, step, options.batch_size, bytes_per_device=step.bytes_per_device())


# ---- what XLA says -----------------------------------------------------------------------------------


def collectives(text: str) -> list[dict]:
    """Every collective of a compiled program: its kind and the bytes that one device puts in."""
    return [
        {"kind": one.opcode.removesuffix("-start"), "bytes": one.output_bytes}
        for one in hlo.parse(text).instructions()
        if hlo.is_collective(one)
    ]


def count_by_xla(dtype: str, conv: str, micro_batch_size: int) -> dict[str, float]:
    """FLOPs and bytes per image of one compiled micro-batch gradient, as XLA's cost analysis has them.

    Of a loop XLA counts one turn, so the gradient is compiled by itself. On CPU it knows nothing of what
    goes on in library calls: the counts are then too low.
    """
    network = make_network(dtype, conv)
    params, model_state = model.init_variables(network, serve.IMAGE_SHAPE, 0)
    batch = Batch(
        jax.ShapeDtypeStruct((micro_batch_size, math.prod(serve.IMAGE_SHAPE)), jnp.uint8),
        jax.ShapeDtypeStruct((micro_batch_size,), jnp.int32),
        jax.ShapeDtypeStruct((micro_batch_size,), jnp.float32),
    )
    gradient = jax.jit(jax.value_and_grad(make_loss(network), has_aux=True))
    costs = gradient.lower(params, model_state, batch).compile().cost_analysis()
    return {
        "flops": costs.get("flops", 0.0) / micro_batch_size,
        "bytes": costs.get("bytes accessed", 0.0) / micro_batch_size,
    }


# ---- as a child --------------------------------------------------------------------------------------

DEFAULTS = {"batch_size": 512, "micro_batch_size": 16, "dtype": "bfloat16"}


def build(options: dict) -> OurStep:
    """`OurStep` with options as in DEFAULTS and the automatic convolution."""
    start_jax()
    return OurStep(StepOptions(**options, conv=auto_conv()))


if __name__ == "__main__":
    serve.main(build, DEFAULTS)

"""Our inner loop as a contender, on random images that lie on the devices.

It is built without a config, from JAX, NumPy, optax and flax alone, and so runs where nothing else is installed.
tests/test_card.py compares it with what train.py makes of a config.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import model
from benchmarks.peers import serve
from benchmarks.timing import MAX_ROUNDS, Contender
from largebatch.config.fields import BatchConfig, LogConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from largebatch.data.batching import DataSharding, choose_sharding
from largebatch.hardware.chips import Hardware, auto_dtype, options_for
from largebatch.hardware.compiled import COLLECTIVE, parse
from largebatch.hosts import replicas
from largebatch.hosts.start import start_jax
from largebatch.optim.optimizers import create_optimizer
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.tasks.task import Classification
from largebatch.training.costs import training_costs
from largebatch.training.grouping import MicroBatchPlan, plan_micro_batches
from largebatch.training.loss import Batch, make_loss_fn
from largebatch.training.state import count_params, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop
from largebatch.training.views import VIEW_COUNTS, make_read, make_read_slice

NETWORK, OPTIMIZER = "convnet", "adam"
VIEWS = VIEW_COUNTS["all"]
B2, NOISE_DECAY = 0.999, 0.98
AUTO = "auto"


@dataclass(frozen=True)
class StepOptions:
    """What our step is built with; micro_batch_size is per device, conv a key of CONVS.

    `auto_options` says what "auto" means.
    """

    batch_size: int
    micro_batch_size: int | str
    dtype: str
    conv: str
    storage: str = "expanded"
    noise_every: int | str = AUTO  # log.noise_every
    num_images: int | None = None  # that devices hold, or a batch if that is more; None is as many as peers have


def auto_conv() -> str:
    """The convolution that train.py takes by itself."""
    return model.resolve_conv(AUTO, jax.default_backend())


def auto_options(batch_size: int, dtype: str, *, num_devices: int) -> StepOptions:
    """Return what train.py takes by itself for a batch on so many devices, but for the storage."""
    return resolve(StepOptions(batch_size, AUTO, dtype, AUTO), Hardware.here(num_devices))


def resolve(options: StepOptions, hardware: Hardware) -> StepOptions:
    """Replace options that are "auto" as train.py does where everything fits on the devices."""
    dtype, conv, storage = options.dtype, options.conv, options.storage
    if dtype == AUTO:
        dtype = auto_dtype()
    if conv == AUTO:
        conv = model.resolve_conv(AUTO, hardware.platform)
    sharding = _sharding(options, hardware.num_devices)
    storage = "expanded" if storage == AUTO else storage
    options = dataclasses.replace(options, dtype=dtype, conv=conv, storage=storage)
    plan = _plan(options, sharding, hardware)
    every = plan.noise.every if plan.noise else 0
    return dataclasses.replace(options, micro_batch_size=plan.grouping.micro_batch_size, noise_every=every)


def _plan(options: StepOptions, sharding: DataSharding, hardware: Hardware) -> MicroBatchPlan:
    """Plan micro-batches and noise as train.py does: the one place that knows which fields of a config it takes."""
    network = make_network(options.dtype, options.conv)
    return plan_micro_batches(
        np.array([options.batch_size]),
        sharding,
        hardware,
        lambda: training_costs(network, serve.IMAGE_SHAPE).activation_bytes,
        batch=BatchConfig(micro_batch_size=options.micro_batch_size),
        model=ModelConfig(name=NETWORK, norm="none"),
        schedule=ScheduleConfig(noise_decay=NOISE_DECAY),
        log=LogConfig(noise_every=options.noise_every),
        in_any_order=options.storage == "expanded" and options.batch_size == sharding.num_examples,
    )


def _sharding(options: StepOptions, num_devices: int) -> DataSharding:
    num_originals = -(-max(options.batch_size, options.num_images or serve.NUM_IMAGES) // VIEWS)
    return choose_sharding(None, num_originals, num_devices, VIEWS)


def make_network(dtype: str, conv: str):
    """The network of every contender."""
    return model.create_model(NETWORK, serve.NUM_CLASSES, dtype, conv)


def make_loss(network) -> Callable:
    """Make the loss on the images of every contender, as they lie on the devices."""
    mean, std = (serve.MEAN,) * 3, (serve.STD,) * 3
    return make_loss_fn(network, serve.IMAGE_SHAPE, mean, std, Classification(serve.NUM_CLASSES))


class OurStep(serve.Step):
    """The compiled inner loop. Its `batch_size` may be changed between runs: it is not compiled in."""

    def __init__(self, options: StepOptions):
        self.batch_size = options.batch_size
        self._next_update = 0
        hardware = Hardware.here()
        self.options = resolve(options, hardware)
        self.network = make_network(self.options.dtype, self.options.conv)
        self._sharding = _sharding(self.options, hardware.num_devices)
        self._plan = _plan(self.options, self._sharding, hardware)
        self._data = self._make_data()
        self._inner_loop = make_inner_loop(self._make_step())
        self._state = replicas.replicate(jax.jit(_first_state, static_argnums=0)(self.network))

    def _make_step(self) -> TrainStep:
        """Make the step, as `build.make_parts` does from a config."""
        plan, task = self._plan, Classification(serve.NUM_CLASSES)
        read = make_read(self.options.storage, serve.IMAGE_SHAPE, VIEWS, task)
        read_slice = make_read_slice(serve.IMAGE_SHAPE, VIEWS, task) if plan.by_slices else None
        reader = MicroBatchReader(read, self._sharding, plan.grouping, plan.single, read_slice)
        return TrainStep(
            make_loss(self.network),
            create_optimizer(OptimizerConfig(name=OPTIMIZER)),
            reader,
            noise=plan.noise,
        )

    def _make_data(self) -> dict:
        views = 1 if self.options.storage == "on_device" else VIEWS
        return _random_rows(self._sharding, views, math.prod(serve.IMAGE_SHAPE))

    def _inputs(self) -> UpdateInputs:
        """Inputs of the next updates."""
        before = np.arange(self._next_update, self._next_update + MAX_ROUNDS, dtype=np.int64) * self.batch_size
        epoch, offset = epoch_and_offset(before, self._sharding.num_examples)
        every = np.ones(MAX_ROUNDS, np.float32)
        return UpdateInputs(
            epoch=epoch,
            offset=offset,
            batch_size=np.full(MAX_ROUNDS, self.batch_size, np.int32),
            learning_rate=serve.LEARNING_RATE * every,
            b2=B2 * every,
        )

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
        """The options that were resolved, the collectives of the compiled program, the number of parameters."""
        return {
            "options": dataclasses.asdict(self.options),
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
        lowered = self._inner_loop.lower(self._state, self._data, self._inputs(), self._count(0))
        return lowered.compile(compiler_options=options_for(jax.default_backend()))


def _first_state(network):
    """The state before the first update."""
    params, model_state = model.init_variables(network, serve.IMAGE_SHAPE, 0)
    return create_train_state(params, create_optimizer(OptimizerConfig(name=OPTIMIZER)), 0, model_state)


@functools.lru_cache(maxsize=1)  # gigabytes, which the next contender mostly wants again
def _random_rows(sharding: DataSharding, views: int, image_size: int) -> dict:
    """Random images of this host's devices in so many views, as flat rows, and the labels of the originals."""
    rows = sharding.max_originals * views
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
        for one in parse(text).instructions()
        if COLLECTIVE.fullmatch(one.opcode)
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
        jax.ShapeDtypeStruct((1, micro_batch_size), jnp.float32),
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
    return OurStep(StepOptions(**options, conv=AUTO))


if __name__ == "__main__":
    serve.main(build, DEFAULTS)

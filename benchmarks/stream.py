"""bench.py stream: updates on images that are read as they are needed, beside images that stay on the devices."""

import statistics

import jax
import numpy as np

import augment
from benchmarks.inputs import make_config
from benchmarks.peers import serve
from benchmarks.timing import Contender, about_machine, interleave, ratio
from build import make_step
from largebatch.data.cache import Cache, DatasetInfo
from largebatch.data.placement import place
from largebatch.data.streaming import Upcoming
from largebatch.hardware.chips import Hardware
from largebatch.hosts import replicas
from largebatch.hosts.start import start_jax
from largebatch.optim.optimizers import Hyperparams
from largebatch.training.step import make_inner_loop
from plan import make_init, plan_run

DTYPE = "float32"


def bench_stream(path: str, cache_dir: str, batch_size: int, repeats: int) -> dict:
    """Updates on the zip or folder `path`; the stream has the smallest buffer, so that every update reads."""
    start_jax()
    config = make_config(path, cache_dir)
    config = config.replace(model={"dtype": DTYPE}, batch={"size": batch_size})
    storages = ("streamed", "on_device")

    def place_both(cache: Cache) -> list[StepOnCache]:
        return [StepOnCache(config.replace(augment={"storage": storage}), cache) for storage in storages]

    steps = augment.with_cache(config.replace(augment={"storage": "streamed"}), place_both)
    contenders = [Contender(storage, step, batch_size) for storage, step in zip(storages, steps, strict=True)]
    times = interleave(contenders, repeats)
    streamed, resident = contenders
    return {
        "command": "stream",
        "batch_size": batch_size,
        "dtype": DTYPE,
        "image_shape": steps[0].image_shape,
        "repeats": repeats,
        "images_per_sec": {c.name: c.images / statistics.median(times[c.name]) for c in contenders},
        "ratio": ratio(streamed, resident, times),
        **about_machine(),
    }


class StepOnCache(serve.Step):
    """Our inner loop on the training images of a cache, by augment.storage."""

    def __init__(self, config, cache: Cache):
        plan = plan_run(config, DatasetInfo.of(cache), Hardware.here())
        buffer_rows = None
        if config.augment.storage == "streamed":
            buffer_rows = plan.sharding.share_bounds(plan.schedule.max_batch_size)[1]
        self._plan, self.image_shape = plan, cache.layout.image_shape
        self._data = place(cache, plan.sharding, config.dataset.split_seed, buffer_rows=buffer_rows).train
        self._inner_loop = make_inner_loop(make_step(plan))
        hyperparams = Hyperparams.from_config(config.optimizer)
        self._state = replicas.replicate(make_init(plan)(np.uint32(config.seed), hyperparams, None))
        self._next_update = 0

    def run(self, updates: int) -> None:
        """See `serve.Step`."""
        schedule, end = self._plan.schedule, self._next_update + updates
        while self._next_update < end:
            # One more is planned than is done here, so that every run has one to read and finds one read.
            upcoming = Upcoming(self._plan.config.seed, self._next_update, end + 1, schedule.examples_before)
            loaded = self._data.for_updates(upcoming, end - self._next_update)
            inputs = schedule.inputs(self._next_update, self._plan.inputs_length)
            num_updates = min(loaded.num_updates, self._plan.inputs_length)
            self._state, metrics = self._inner_loop(self._state, loaded.arrays, inputs, np.int32(num_updates))
            jax.block_until_ready((self._state, metrics))
            self._next_update += num_updates

    def updates(self) -> int:
        """See `serve.Step`."""
        return int(replicas.first_replica(self._state.step))

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return jax.tree.leaves(replicas.first_replica(self._state.params))


def print_stream(result: dict) -> None:
    """The result of `bench_stream`, in a line."""
    rates, speed = result["images_per_sec"], result["ratio"]
    print(
        f"batch {result['batch_size']:,}   streamed {rates['streamed']:,.0f} images/s, on the devices "
        f"{rates['on_device']:,.0f}: {speed['median']:.3f}x ({speed['min']:.3f}-{speed['max']:.3f})"
    )

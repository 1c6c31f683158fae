"""Small training problems on several devices: a step, data on the devices, and variables to start from."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from largebatch.config.fields import OptimizerConfig
from largebatch.data import batching
from largebatch.data.batching import DataSharding, Grouping
from largebatch.hardware.compiled import compile_and_look
from largebatch.hosts import replicas
from largebatch.optim.optimizers import create_optimizer
from largebatch.optim.schedules import StepInputs, epoch_and_offset
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop

PLAIN_SGD = OptimizerConfig(name="sgd", momentum=0.0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A training step, the data on the devices and the variables to start from."""

    step: TrainStep
    data: Any
    params: dict
    model_state: dict = dataclasses.field(default_factory=dict)

    @property
    def sharding(self) -> DataSharding:
        return self.step.reader.sharding

    @functools.cached_property
    def loop(self) -> Callable:
        return make_inner_loop(self.step)

    def first_state(self, seed=0) -> TrainState:
        """The state before the first step; a new one for every call, since the loop takes its memory."""
        keeps_ema = self.step.ema_decay > 0
        state = create_train_state(
            self.params, self.step.optimizer, seed, self.model_state, ema=keeps_ema, local=True
        )
        return replicas.replicate(state, replicas.local_devices_of(self.data))

    def run(self, inputs: StepInputs, num_steps: int, state: TrainState | None = None):
        """Take steps on all devices together."""
        return self.loop(state or self.first_state(), self.data, inputs, np.int32(num_steps))

    def run_sizes(self, sizes, rates=1.0, before=0, state=None, length=20):
        """Take steps with these batch sizes, after `before` examples, by a program for up to `length` steps."""
        inputs = inputs_of(sizes, self.sharding.num_examples, rates, before, length)
        return self.run(inputs, len(sizes), state)

    def collectives(self) -> list[tuple[str, float]]:
        """The collectives of `run_sizes`, each with how often it runs in a step of two micro-batches."""
        inputs = inputs_of([64], self.sharding.num_examples, 1.0, length=20)
        arguments = self.first_state(), self.data, inputs, np.int32(1)
        found = compile_and_look(self.loop.lower(*arguments), {"steps": 1, "micro_batches": 2}, "cpu").collectives
        return [(one.opcode.removesuffix("-start"), one.times) for one in found]

    def examples(self, device: int, inputs: StepInputs, index: int) -> np.ndarray:
        """The indices of the examples that a device takes in step number `index`."""
        of_step = (np.int32(x[index]) for x in (inputs.epoch, inputs.offset, inputs.batch_size))
        chosen = _whole_device_batch(self.sharding, device, *of_step)
        examples, views = np.asarray(chosen.examples)[np.asarray(chosen.weights) == 1], self.sharding.views
        return self.sharding.originals_of(device, seed=0)[examples // views] * views + examples % views

    def all_examples(self, inputs: StepInputs, index: int) -> np.ndarray:
        """The indices of the examples that all devices take in step number `index`."""
        return np.concatenate([self.examples(device, inputs, index) for device in range(self.sharding.num_devices)])


@functools.partial(jax.jit, static_argnums=0)
def _whole_device_batch(sharding, device, epoch, offset, batch_size) -> batching.MicroBatchIndices:
    batch = batching.device_batch(sharding, device, epoch, offset, batch_size)
    return batching.micro_batch(sharding, batch, 0, Grouping(sharding.num_examples, sharding.num_examples), 0)


def inputs_of(sizes, num_examples: int, rates, before: int = 0, length: int = 0) -> StepInputs:
    """The inputs of steps with these batch sizes after `before` examples, padded to `length` steps.

    Args:
      rates: a rate for all steps, or what StepInputs has.
    """
    sizes = np.pad(np.int32(sizes), (0, max(length - len(sizes), 0)), constant_values=1)
    epoch, offset = epoch_and_offset(before + np.cumsum([0, *sizes[:-1]], dtype=np.int64), num_examples)
    rates = np.full(len(sizes), rates, np.float32) if np.ndim(rates) == 0 else np.float32(rates)
    rates = np.pad(rates, (0, max(len(sizes) - len(rates), 0)))
    return StepInputs(epoch, offset, sizes, rates, b2=np.full(len(sizes), 0.999, np.float32))


def place(sharding: DataSharding, arrays_of: Callable[[np.ndarray], dict]):
    """Put arrays [rows, ...] of every device's originals there; `arrays_of` makes them."""
    shards = []
    for index, device in zip(replicas.local_indices(), jax.local_devices(), strict=True):
        if index < sharding.num_devices:
            originals = sharding.originals_of(index, seed=0)
            padded = np.pad(originals, (0, sharding.max_originals - len(originals)))
            shards.append(jax.device_put(jax.tree.map(lambda x: x[None], arrays_of(padded)), device))
    return replicas.stack(shards)


def problem_of_vectors(
    vectors, loss_fn, params, num_devices, optimizer=PLAIN_SGD, *, micro_batch_size=16, views=1, **options
) -> Problem:
    """A problem whose TrainStep has these `options`; views of a vector are the vector."""
    sharding = DataSharding(len(vectors), 64, num_devices, views)

    def read(data, examples, visit_keys):
        return data["vectors"][examples // views], jnp.zeros(examples.shape, jnp.int32)

    reader = MicroBatchReader(read, sharding, Grouping(micro_batch_size, micro_batch_size))
    step = TrainStep(loss_fn, create_optimizer(optimizer), reader, **options)
    return Problem(step, place(sharding, lambda originals: {"vectors": vectors[originals]}), params)

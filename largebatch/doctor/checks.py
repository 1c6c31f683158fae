"""Checks before a long run: python train.py ... --doctor

The doctor runs the real data, network and optimizer of the config for a few steps, in under a minute once the
data are cached, and prints line by line what is fine, doubtful or wrong, and what to change.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.config.fields import SyncConfig
from largebatch.data import batching
from largebatch.data.batching import Grouping
from largebatch.data.placement import DeviceData
from largebatch.data.streaming import load_inputs
from largebatch.doctor.findings import FAIL, OK, WARN, Finding, duration, show
from largebatch.hosts import collectives, replicas
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim import optimizers
from largebatch.optim.schedule_text import describe_schedule
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.runs import checkpoints
from largebatch.runs.display import LONG_RUN_SEC
from largebatch.training.loss import Batch
from largebatch.training.programs import Programs
from largebatch.training.state import TrainState
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop
from largebatch.training.validation import validate

BUDGET_SEC = 40.0  # time after which no further micro-batch size is tried
# Limits of the ratio of an update's norm to its layer's: too high diverges, too low stands still.
FAIL_UPDATE_RATIO, MAX_UPDATE_RATIO, MIN_UPDATE_RATIO = 1.0, 0.1, 1e-6
# You et al. 2020, section 3, clip the trust ratio to such a range ("phi").
MIN_TRUST_RATIO, MAX_TRUST_RATIO = 1e-3, 10.0
BETTER = 1.1  # speed-up from which another micro-batch size is recommended
TIMED_SEC, TIMED_REPEATS = 0.5, 3


class Subject(NamedTuple):
    """Prepared run to examine: a build.RunPlan, with its data on the devices and its programs."""

    plan: Any
    data: DeviceData
    programs: Programs


def report(subject: Subject, state: TrainState, sync: SyncConfig, started: float) -> None:
    """Print the findings about a prepared run.

    Raises:
      UserError: one of the findings is a fail.
    """
    findings = examine(subject, state, sync, started)
    show(findings, f"examined in {time.perf_counter() - started:.0f} s; nothing was written to a run folder")


def examine(subject: Subject, state: TrainState, sync: SyncConfig, started: float) -> list[Finding]:
    """Examine a config and return all findings, on every host.

    Args:
      subject: result of `build.prepare` for a config of `examine.config_to_examine`.
      state: state before the first step.
      sync: the user's `config.sync`.
      started: time.perf_counter() when the examination began.
    """
    config = subject.plan.config
    start = replicas.first_replica(state)
    findings = [check_update(subject, start)]
    if config.optimizer.name == "lamb":
        gradient = plain_gradient(subject, start)
        findings.append(check_trust_ratios(gradient, start.params, config.optimizer.weight_decay))
    timings = time_micro_batches(subject, start, started)
    return [
        *findings,
        check_micro_batch(subject, timings),
        check_learning_rate(subject),
        estimate_time(subject, state, timings),
        count_bytes(subject, sync),
    ]


# ---- gradients ------------------------------------------------------------------------------------


def _inputs(
    subject: Subject, batch_size: int, learning_rate: float = 0.0, length: int | None = None
) -> UpdateInputs:
    """Make the inputs of `length` steps of one size and rate; by default as many as a call can do."""
    length = length or subject.plan.inputs_length
    examples_before = np.arange(length, dtype=np.int64) * batch_size
    epoch, offset = epoch_and_offset(examples_before, subject.plan.num_examples)
    sizes, rates = np.full(length, batch_size, np.int32), np.full(length, learning_rate, np.float32)
    return UpdateInputs(epoch, offset, sizes, rates, b2=np.float32(subject.plan.schedule.b2s(sizes)))


@dataclasses.dataclass(frozen=True)
class CheckedBatch:
    """Batch whose gradient is checked: the first of a run, in one micro-batch on each device."""

    size: int  # examples over all devices
    grouping: Grouping

    @classmethod
    def of(cls, plan) -> "CheckedBatch":
        """Choose the largest batch that a run's micro-batches allow."""
        sharding = plan.sharding
        size = min(plan.micro_batch_size * plan.num_devices, sharding.num_originals)
        most_per_device = sharding.share_bounds(size)[1]
        return cls(size, Grouping(most_per_device, most_per_device))


def plain_gradient(subject: Subject, start: TrainState):
    """Compute the mean gradient over the examples of `CheckedBatch`, without the machinery of the step."""
    checked, sharding = CheckedBatch.of(subject.plan), subject.plan.sharding
    step = subject.programs.step

    def gradient(state, data):
        device = lax.axis_index(AXIS)
        batch = batching.device_batch(sharding, device, 0, 0, checked.size)
        chosen = batching.micro_batch(sharding, batch, 0, checked.grouping, jnp.uint32(0))
        images, labels = step.reader.read(data, chosen.examples, chosen.visit_keys)
        grads, _ = jax.grad(step.loss_fn, has_aux=True)(
            state.params, state.model_state, Batch(images, labels, chosen.weights[None])
        )
        return jax.tree.map(lambda g: lax.psum(g, AXIS) / checked.size, grads)

    run = pmap(gradient, in_axes=(0, 0), out_axes=None)
    data = load_inputs(subject.data.train, sharding, 0, _inputs(subject, checked.size, length=1)).arrays
    return jax.tree.map(np.asarray, run(replicas.replicate(start), data))


def _norm(tree) -> float:
    return float(np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(tree))))


# ---- updates --------------------------------------------------------------------------------------


def _kernels(tree) -> dict:
    """Return the leaves by name, without biases: those start at zero, so that ratios are meaningless."""
    return {name: leaf for name, leaf in checkpoints.named_leaves(tree).items() if leaf.ndim > 1}


def check_update(subject: Subject, start: TrainState) -> Finding:
    """Compare the norms of an update at the highest rate with those of the parameters, layer by layer."""
    plan = subject.plan
    rate = float(plan.schedule.learning_rates(np.arange(plan.schedule.num_updates)).max())
    batch_size = min(plan.schedule.max_batch_size, plan.micro_batch_size * plan.num_devices * 4)
    inputs = _inputs(subject, batch_size, rate)
    state = replicas.replicate(start)
    num_updates = 2 if plan.config.optimizer.name in optimizers.WITH_BASES else 1
    data = load_inputs(subject.data.train, plan.sharding, start.seed, inputs).arrays
    for _ in range(num_updates):
        state, _ = subject.programs.inner_loop(state, data, inputs, np.int32(1))
    change = jax.tree.map(np.subtract, replicas.first_replica(state.params), start.params)
    change, kernels = checkpoints.named_leaves(change), _kernels(start.params)
    ratios = {name: _norm(change[name]) / _norm(kernels[name]) for name in kernels if np.any(kernels[name])}
    return _judge_updates(ratios, rate)


def check_trust_ratios(gradient, params, weight_decay: float) -> Finding:
    """Check LAMB's trust ratios at the first step: ||p|| / ||Adam's direction + decay * p||, by kernel.

    You et al. 2020, algorithm 2. Adam's first direction is the gradient over its own size, whatever its decays. A
    layer without a gradient has no ratio.
    """
    gradients, ratios = checkpoints.named_leaves(gradient), {}
    for layer, kernel in _kernels(params).items():
        grad = np.asarray(gradients[layer])
        direction = grad / (np.abs(grad) + optimizers.LAMB_EPSILON) + weight_decay * kernel
        ratios[layer] = _norm(kernel) / _norm(direction) if np.any(grad) else np.inf
    text, name = f"{_range_text(ratios)} at the first update", "trust ratio"
    if dead := [layer for layer, ratio in ratios.items() if np.isinf(ratio)]:
        return Finding(WARN, name, text, f"no gradient reaches {', '.join(dead)}")
    if all(MIN_TRUST_RATIO <= ratio <= MAX_TRUST_RATIO for ratio in ratios.values()):
        return Finding(OK, name, text)
    allowed = f"allowed {MIN_TRUST_RATIO:g} to {MAX_TRUST_RATIO:g}"
    return Finding(WARN, name, text, f"{allowed}: look at the initialisation")


def _range_text(values: dict[str, float]) -> str:
    lowest, highest = min(values, key=values.get), max(values, key=values.get)
    return f"{values[lowest]:.2g} ({lowest}) to {values[highest]:.2g} ({highest})"


def _judge_updates(ratios: dict[str, float], learning_rate: float) -> Finding:
    text, name = f"{_range_text(ratios)} of the kernels' norms", "first update"
    lowest, highest = min(ratios.values()), max(ratios.values())
    if not np.isfinite(highest) or highest > FAIL_UPDATE_RATIO:
        return Finding(FAIL, name, text, f"optimizer.learning_rate {learning_rate:g} is far too high")
    if highest > MAX_UPDATE_RATIO:
        lower = learning_rate * MAX_UPDATE_RATIO / highest
        return Finding(WARN, name, text, f"optimizer.learning_rate {learning_rate:g} is high: try {lower:.2g}")
    if lowest < MIN_UPDATE_RATIO:
        advice = f"optimizer.learning_rate {learning_rate:g} is low, or a layer gets no gradient"
        return Finding(WARN, name, text, advice)
    return Finding(OK, name, text)


def check_learning_rate(subject: Subject) -> Finding:
    """Describe the learning rate that the steps will use."""
    plan = subject.plan
    epochs = plan.schedule.examples_before(plan.schedule.num_updates) / plan.num_examples
    text = describe_schedule(plan.schedule).removeprefix("learning rate ")
    return Finding(OK, "learning rate", f"{text}; {_bound(plan)}{epochs:,.1f} epochs")


def _bound(plan) -> str:
    """Return "at least ", "at most " or "about " if training decides the length of the run, else ""."""
    if plan.config.batch.auto:
        return "at least "  # the batch grows
    if plan.schedule.scale_invariant:  # a step of the reference batch or more counts as at least one
        smallest = plan.schedule.batch_sizes.first(plan.schedule.num_updates).values.min()
        return "at most " if smallest >= plan.config.schedule.reference_batch_size else "about "
    return ""


# ---- sizes ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class _SizeTiming:
    """Speed of one micro-batch size, or its error."""

    loop: Callable
    state: TrainState
    runs: int = 0  # the first one compiles
    seconds: float = np.inf  # best seconds per example of all devices together
    error: str | None = None  # reason why it does not run

    def run(self, data, inputs: UpdateInputs, num_updates: int, num_examples: int) -> float:
        """Run some steps; return the seconds that they took, infinite if they fail."""
        begin = time.perf_counter()
        try:
            self.state, _ = self.loop(self.state, data, inputs, np.int32(num_updates))
            jax.block_until_ready(self.state)
        except jax.errors.JaxRuntimeError as error:
            self.error = str(error).splitlines()[0][:120]
            return np.inf
        seconds = time.perf_counter() - begin
        if self.runs:
            self.seconds = min(self.seconds, seconds / num_examples)
        self.runs += 1
        return seconds


def time_micro_batches(subject: Subject, start: TrainState, started: float) -> dict[int, _SizeTiming]:
    """Time the run's own micro-batch size, half and twice of it.

    Sizes take turns and the best of each counts, since a shared machine is only ever too slow.
    """
    plan, own_size = subject.plan, subject.plan.micro_batch_size
    batch_size = min(plan.schedule.max_batch_size, plan.num_devices * own_size * 8)
    inputs = _inputs(subject, batch_size)
    data = load_inputs(subject.data.train, plan.sharding, start.seed, inputs)
    timings = {size: _SizeTiming(loop, replicas.replicate(start)) for size, loop in _loops_by_size(subject).items()}
    num_updates = 1
    for repeat in range(1 + TIMED_REPEATS):
        for size, timing in timings.items():
            late = bool(collectives.from_primary(np.int32(time.perf_counter() - started > BUDGET_SEC)))
            if timing.error or (late and not timing.runs and size != own_size):
                continue
            seconds = timing.run(data.arrays, inputs, num_updates if timing.runs else 1, num_updates * batch_size)
            if repeat == 0 and size == own_size and not timing.error:
                most = min(plan.config.train.inner_steps, data.num_updates)
                num_updates = int(np.clip(TIMED_SEC / seconds, 1, most))
                num_updates = int(collectives.from_primary(np.int32(num_updates)))
    return {size: timing for size, timing in timings.items() if timing.runs or timing.error}


def _loops_by_size(subject: Subject) -> dict[int, Callable]:
    plan, step = subject.plan, subject.programs.step
    own_size = plan.micro_batch_size
    largest = -(-plan.schedule.max_batch_size // plan.num_devices)
    loops = {own_size: subject.programs.inner_loop}
    ghost_size = plan.config.batch.ghost_size and plan.grouping.group_size
    for size in (own_size // 2, own_size * 2):
        # On a pod a host that runs out of memory alone would leave the others in a collective.
        if 1 <= size <= largest and size % (ghost_size or 1) == 0 and jax.process_count() == 1:
            grouping = Grouping(size, ghost_size or size)
            reader = MicroBatchReader(step.reader.read, plan.sharding, grouping)
            loops[size] = make_inner_loop(TrainStep(step.loss_fn, step.optimizer, reader))
    return loops


def check_micro_batch(subject: Subject, timings: dict[int, _SizeTiming]) -> Finding:
    """Check that the micro-batch size fits, and recommend half or twice of it if that is faster."""
    own_size, name = subject.plan.micro_batch_size, "micro-batch"
    if timings[own_size].error:
        ghost_size = subject.plan.config.batch.ghost_size or 1
        advice = f"set batch.micro_batch_size {max(own_size // 2 // ghost_size, 1) * ghost_size}"
        return Finding(FAIL, name, f"{own_size} does not run: {timings[own_size].error}", advice)
    images_per_sec = {size: 1 / timing.seconds for size, timing in timings.items() if not timing.error}
    text = ", ".join(f"{size}: {images_per_sec[size]:,.0f}" for size in sorted(images_per_sec))
    best = max(images_per_sec, key=images_per_sec.get)
    text = f"{own_size} fits; images/s in {subject.plan.config.model.dtype} at size {text}"
    if subject.programs.network.norm == "batch" and subject.plan.config.batch.ghost_size is None:
        return Finding(OK, name, f"{text}; another size is another normalisation")
    if images_per_sec[best] > BETTER * images_per_sec[own_size]:
        return Finding(WARN, name, text, f"set batch.micro_batch_size {best}")
    return Finding(OK, name, text)


def estimate_time(subject: Subject, state: TrainState, timings: dict[int, _SizeTiming]) -> Finding:
    """Estimate the time of all steps and validations of the run from `timings`."""
    plan = subject.plan
    own = timings[plan.micro_batch_size]
    if own.error:
        return Finding(FAIL, "time", "unknown: no update ran")
    for _ in range(2):  # once to compile
        begin = time.perf_counter()
        validate(subject.programs, subject.data, state)
        validation = time.perf_counter() - begin
    num_updates, inner_steps = plan.schedule.num_updates, plan.config.train.inner_steps
    training = own.seconds * plan.schedule.examples_before(num_updates)
    update = training / num_updates
    total = training + -(-num_updates // inner_steps) * validation
    about = _bound(plan) or "about "
    text = f"{about}{duration(total)}: {duration(update)} an update, {duration(validation)} a validation"
    if validation > inner_steps * update:
        return Finding(WARN, "time", text, "validations take most of it: raise train.inner_steps")
    if total > LONG_RUN_SEC:
        return Finding(WARN, "time", text, "fewer train.outer_steps or a smaller batch.size take less")
    return Finding(OK, "time", text)


def count_bytes(subject: Subject, sync: SyncConfig) -> Finding:
    """Count the bytes that each device sends per step, by a ring all-reduce unless steps are local."""
    num_devices = subject.plan.num_devices
    sent = 2 * (num_devices - 1) / num_devices * subject.programs.allreduce_bytes
    text = f"{sent / 1e6:.2f} MB sent by each of {num_devices} devices an update"
    if sync.mode != "every_step":
        text += f"; from update {sync.start_step} on, parameters and more every {sync.every} updates instead"
    return Finding(OK, "traffic", text)

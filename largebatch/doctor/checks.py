"""Checks before a long run: python train.py ... --doctor

Takes the real data, network and optimizer of the config for a few updates, in under a minute once the
data are cached, and says line by line what is fine, doubtful or wrong, and what to change.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from largebatch.data import batching
from largebatch.data.batching import Grouping
from largebatch.data.placement import bytes_per_device
from largebatch.data.streaming import load_inputs
from largebatch.doctor.findings import FAIL, OK, WARN, Finding, duration, show
from largebatch.hosts import collectives, memory, replicas
from largebatch.hosts.replicas import AXIS, pmap
from largebatch.optim import optimizers, schedule_text
from largebatch.optim.schedules import UpdateInputs, epoch_and_offset
from largebatch.runs import checkpoints
from largebatch.runs.display import LONG_RUN_SEC
from largebatch.training.costs import bytes_beside_images
from largebatch.training.loss import Batch
from largebatch.training.setup import Setup
from largebatch.training.state import TrainState, create_train_state
from largebatch.training.step import MicroBatchReader, TrainStep, make_inner_loop

BUDGET_SEC = 40.0  # after which no further micro-batch size is tried
MAX_GRADIENT_ERROR = 0.02  # of the gradient's norm; rounding stays below, a sum in place of a mean is 1 or more
# Of an update's norm to its layer's: above the first training is torn about, below the last it stands still.
FAIL_UPDATE_RATIO, MAX_UPDATE_RATIO, MIN_UPDATE_RATIO = 1.0, 0.1, 1e-6
# You et al. 2020, section 3, clip it to such a range ("phi").
MIN_TRUST_RATIO, MAX_TRUST_RATIO = 1e-3, 10.0
BETTER = 1.1  # how much faster another micro-batch size must be to be worth a word
TIMED_SEC, TIMED_REPEATS = 0.5, 3


def config_to_examine(config):
    """A copy of `config` that can be examined: with a gradient at the start, and updates that all devices share."""
    config = config.copy_and_resolve_references()
    config.model.zero_head = False  # before it the first gradient would be zero, which says nothing
    config.sync.mode, config.sync.start_step = "every_step", 0
    return config


def report(experiment, state: TrainState, sync, started: float) -> None:
    """Prints the findings about a prepared experiment.

    Raises:
      UserError: one of them is a fail.
    """
    findings = examine(experiment, state, sync, started)
    show(findings, f"examined in {time.perf_counter() - started:.0f} s; nothing was written to a run folder")


def examine(experiment, state: TrainState, sync, started: float) -> list[Finding]:
    """All findings about a config, on every host.

    Args:
      experiment: what `experiment.prepare` made of `config_to_examine(config)`, and its state.
      sync: the user's `config.sync`.
      started: time.perf_counter() when the examination began.
    """
    config = experiment.setup.config
    start = replicas.first_replica(state)
    gradient = plain_gradient(experiment, start)
    findings = [check_gradient(experiment, start, gradient), check_update(experiment, start)]
    if config.optimizer.name == "lamb":
        findings.append(check_trust_ratios(gradient, start.params, config.optimizer.weight_decay))
    timings = time_micro_batches(experiment, start, started)
    return [
        *findings,
        check_micro_batch(experiment, timings),
        check_learning_rate(experiment),
        check_memory(experiment, state),
        estimate_time(experiment, state, timings),
        count_bytes(experiment, sync),
    ]


# ---- gradients ------------------------------------------------------------------------------------


def _inputs(experiment, batch_size: int, learning_rate: float = 0.0, length: int | None = None) -> UpdateInputs:
    """Of the first `length` updates, if all were of one size and rate; by default as many as a call can do."""
    length = length or experiment.setup.program.inputs_length
    examples_before = np.arange(length, dtype=np.int64) * batch_size
    epoch, offset = epoch_and_offset(examples_before, experiment.setup.num_examples)
    sizes, rates = np.full(length, batch_size, np.int32), np.full(length, learning_rate, np.float32)
    return UpdateInputs(epoch, offset, sizes, rates, b2=experiment.setup.schedule.b2s(sizes))


@dataclasses.dataclass(frozen=True)
class CheckedBatch:
    """The batch whose gradient is checked: the first of a run, in one micro-batch on each device."""

    size: int  # examples over all devices
    grouping: Grouping

    @classmethod
    def of(cls, setup: Setup) -> "CheckedBatch":
        """As large as a run's micro-batches allow."""
        sharding = setup.program.sharding
        size = min(setup.micro_batch_size * setup.num_devices, sharding.num_originals)
        most_per_device = sharding.share_bounds(size)[1]
        return cls(size, Grouping(most_per_device, most_per_device))


def plain_gradient(experiment, start: TrainState):
    """The mean gradient over the examples of `CheckedBatch`, without the machinery of the step."""
    checked, sharding = CheckedBatch.of(experiment.setup), experiment.setup.program.sharding
    step = experiment.programs.parts.step

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
    data = load_inputs(experiment.data.train, sharding, 0, _inputs(experiment, checked.size, length=1)).arrays
    return jax.tree.map(np.asarray, run(replicas.replicate(start), data))


def _norm(tree) -> float:
    return float(np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(tree))))


def check_gradient(experiment, start: TrainState, expected) -> Finding:
    """The step's gradient is `expected`, from `plain_gradient`, and not a sum of means; replicas stay equal."""
    name, checked, sharding = "gradient", CheckedBatch.of(experiment.setup), experiment.setup.program.sharding
    # Plain SGD at rate 1: the update is the gradient.
    optimizer = optimizers.create_optimizer("sgd", optimizers.Hyperparams(momentum=0.0))
    step = experiment.programs.parts.step
    reader = MicroBatchReader(step.reader.read, sharding, checked.grouping)
    loop = make_inner_loop(TrainStep(step.loss_fn, optimizer, reader))
    state = replicas.replicate(create_train_state(start.params, optimizer, 0, start.model_state))
    inputs = _inputs(experiment, checked.size, learning_rate=1.0, length=1)
    data = load_inputs(experiment.data.train, sharding, 0, inputs).arrays
    state, _ = loop(state, data, inputs, np.int32(1))
    gradient = jax.tree.map(np.subtract, start.params, replicas.first_replica(state.params))
    ratio = _norm(gradient) / _norm(expected)
    error = _norm(jax.tree.map(np.subtract, gradient, expected)) / _norm(expected)
    text = f"reduced gradient is {ratio:.3f} x the mean over {sharding.num_devices} devices"
    if not error < MAX_GRADIENT_ERROR:
        return Finding(
            FAIL, name, f"{text}, off by {error:.2g}", "a sum taken for a mean? see step.make_inner_loop"
        )
    try:
        replicas.check_replicas(state, "states")
    except RuntimeError as trouble:
        return Finding(FAIL, name, str(trouble), "a device computes wrongly: run without it")
    return Finding(OK, name, f"{text} (difference {error:.1g}), replicas are equal")


# ---- updates --------------------------------------------------------------------------------------


def _kernels(tree) -> dict:
    """Leaves by name, without biases: those start at zero, so no ratio says anything of them."""
    return {name: leaf for name, leaf in checkpoints.named_leaves(tree).items() if leaf.ndim > 1}


def check_update(experiment, start: TrainState) -> Finding:
    """Norms of an update at the highest rate beside those of the parameters, layer by layer."""
    setup = experiment.setup
    rate = float(setup.schedule.learning_rates(np.arange(setup.schedule.num_updates)).max())
    batch_size = min(setup.schedule.max_batch_size, setup.micro_batch_size * setup.num_devices * 4)
    inputs = _inputs(experiment, batch_size, rate)
    state = replicas.replicate(start)
    num_updates = 2 if setup.program.optimizer in optimizers.WITH_BASES else 1
    data = load_inputs(experiment.data.train, setup.program.sharding, start.seed, inputs).arrays
    for _ in range(num_updates):
        state, _ = experiment.programs.inner_loop(state, data, inputs, np.int32(1))
    change = jax.tree.map(np.subtract, replicas.first_replica(state.params), start.params)
    change, kernels = checkpoints.named_leaves(change), _kernels(start.params)
    ratios = {name: _norm(change[name]) / _norm(kernels[name]) for name in kernels if np.any(kernels[name])}
    return _judge_updates(ratios, rate)


def check_trust_ratios(gradient, params, weight_decay: float) -> Finding:
    """LAMB's trust ratios at the first update; a layer without a gradient has none."""
    ratios = checkpoints.named_leaves(optimizers.trust_ratios(gradient, params, weight_decay))
    ratios = {layer: float(ratios[layer]) for layer in _kernels(params)}
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


def check_learning_rate(experiment) -> Finding:
    """The rate that the updates will use."""
    setup = experiment.setup
    epochs = setup.schedule.examples_before(setup.schedule.num_updates) / setup.num_examples
    text = schedule_text.describe(setup.schedule).removeprefix("learning rate ")
    return Finding(OK, "learning rate", f"{text}; {_bound(setup)}{epochs:,.1f} epochs")


def _bound(setup) -> str:
    """How what the schedule's updates come to stands to what the run will come to, where training decides that."""
    if setup.config.batch.auto:
        return "at least "  # the batch grows
    if setup.schedule.scale_invariant:  # an update of the reference batch or more is worth at least one
        smallest = setup.schedule.batch_sizes.first(setup.schedule.num_updates).values.min()
        return "at most " if smallest >= setup.config.schedule.reference_batch_size else "about "
    return ""


# ---- sizes ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class _SizeTiming:
    """How one micro-batch size does."""

    loop: Callable
    state: TrainState
    runs: int = 0  # the first one compiles
    seconds: float = np.inf  # per example of all devices together, the best so far
    error: str | None = None  # why it does not run

    def run(self, data, inputs: UpdateInputs, num_updates: int, num_examples: int) -> float:
        """Does some updates; returns the seconds they took, infinite if they do not run."""
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


def time_micro_batches(experiment, start: TrainState, started: float) -> dict[int, _SizeTiming]:
    """Times the run's own micro-batch size, half and twice of it.

    Sizes take turns and the best of each counts, since a shared machine is only ever too slow.
    """
    setup, own_size = experiment.setup, experiment.setup.micro_batch_size
    batch_size = min(setup.schedule.max_batch_size, setup.num_devices * own_size * 8)
    inputs = _inputs(experiment, batch_size)
    data = load_inputs(experiment.data.train, setup.program.sharding, start.seed, inputs)
    timings = {
        size: _SizeTiming(loop, replicas.replicate(start)) for size, loop in _loops_by_size(experiment).items()
    }
    num_updates = 1
    for repeat in range(1 + TIMED_REPEATS):
        for size, timing in timings.items():
            late = bool(collectives.from_primary(np.int32(time.perf_counter() - started > BUDGET_SEC)))
            if timing.error or (late and not timing.runs and size != own_size):
                continue
            seconds = timing.run(data.arrays, inputs, num_updates if timing.runs else 1, num_updates * batch_size)
            if repeat == 0 and size == own_size and not timing.error:
                most = min(setup.config.train.inner_steps, data.num_updates)
                num_updates = int(np.clip(TIMED_SEC / seconds, 1, most))
                num_updates = int(collectives.from_primary(np.int32(num_updates)))
    return {size: timing for size, timing in timings.items() if timing.runs or timing.error}


def _loops_by_size(experiment) -> dict[int, Callable]:
    setup, step = experiment.setup, experiment.programs.parts.step
    own_size = setup.micro_batch_size
    largest = -(-setup.schedule.max_batch_size // setup.num_devices)
    loops = {own_size: experiment.programs.inner_loop}
    ghost_size = setup.config.batch.ghost_size and setup.program.grouping.group_size
    for size in (own_size // 2, own_size * 2):
        # On a pod a host that runs out of memory alone would leave the others in a collective.
        if 1 <= size <= largest and size % (ghost_size or 1) == 0 and jax.process_count() == 1:
            grouping = Grouping(size, ghost_size or size)
            reader = MicroBatchReader(step.reader.read, setup.program.sharding, grouping)
            loops[size] = make_inner_loop(TrainStep(step.loss_fn, step.optimizer, reader))
    return loops


def check_micro_batch(experiment, timings: dict[int, _SizeTiming]) -> Finding:
    """Whether the size fits, and whether half or twice of it is faster."""
    own_size, name = experiment.setup.micro_batch_size, "micro-batch"
    if timings[own_size].error:
        ghost_size = experiment.setup.config.batch.ghost_size or 1
        advice = f"set batch.micro_batch_size {max(own_size // 2 // ghost_size, 1) * ghost_size}"
        return Finding(FAIL, name, f"{own_size} does not run: {timings[own_size].error}", advice)
    images_per_sec = {size: 1 / timing.seconds for size, timing in timings.items() if not timing.error}
    text = ", ".join(f"{size}: {images_per_sec[size]:,.0f}" for size in sorted(images_per_sec))
    best = max(images_per_sec, key=images_per_sec.get)
    text = f"{own_size} fits; images/s in {experiment.setup.config.model.dtype} at size {text}"
    if experiment.programs.network.norm == "batch" and experiment.setup.config.batch.ghost_size is None:
        return Finding(OK, name, f"{text}; another size is another normalisation")
    if images_per_sec[best] > BETTER * images_per_sec[own_size]:
        return Finding(WARN, name, text, f"set batch.micro_batch_size {best}")
    return Finding(OK, name, text)


def check_memory(experiment, state: TrainState) -> Finding:
    """The estimate of what a device needs, beside what it has."""
    program = experiment.setup.program
    one_replica = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    of_images = bytes_per_device(
        experiment.cache.layout,
        program.sharding,
        program.stored_views,
        buffer_rows=program.buffer_rows,
    )
    size, platform = experiment.setup.micro_batch_size, experiment.setup.hardware.platform
    of_rest = bytes_beside_images(program.network, one_replica, program.image_shape, size, platform)
    images, rest, free = sum(of_images.values()), sum(of_rest.values()), memory.available_bytes()
    text = f"{(images + rest) / 1e6:,.0f} MB a device, {images / 1e6:,.0f} MB of it images"
    if free is None:
        return Finding(WARN, "memory", text, "this platform does not tell how much there is")
    text += f"; {free / 1e6:,.0f} MB free now"
    if rest > free:
        return Finding(FAIL, "memory", text, "a smaller batch.micro_batch_size, or augment.storage streamed")
    return Finding(OK, "memory", text)


def estimate_time(experiment, state: TrainState, timings: dict[int, _SizeTiming]) -> Finding:
    """Estimate the time of all updates and validations from the times above."""
    setup = experiment.setup
    own = timings[setup.micro_batch_size]
    if own.error:
        return Finding(FAIL, "time", "unknown: no update ran")
    for _ in range(2):  # once to compile
        begin = time.perf_counter()
        experiment.validate(state)
        validation = time.perf_counter() - begin
    num_updates, inner_steps = setup.schedule.num_updates, setup.config.train.inner_steps
    training = own.seconds * setup.schedule.examples_before(num_updates)
    update = training / num_updates
    total = training + -(-num_updates // inner_steps) * validation
    about = _bound(setup) or "about "
    text = f"{about}{duration(total)}: {duration(update)} an update, {duration(validation)} a validation"
    if validation > inner_steps * update:
        return Finding(WARN, "time", text, "validations take most of it: raise train.inner_steps")
    if total > LONG_RUN_SEC:
        return Finding(WARN, "time", text, "fewer train.outer_steps or a smaller batch.size take less")
    return Finding(OK, "time", text)


def count_bytes(experiment, sync) -> Finding:
    """What each device sends per update: a ring all-reduce of the gradient, unless devices take local steps."""
    num_devices = experiment.setup.num_devices
    sent = 2 * (num_devices - 1) / num_devices * experiment.programs.allreduce_bytes
    text = f"{sent / 1e6:.2f} MB sent by each of {num_devices} devices an update"
    if sync.mode != "every_step":
        text += f"; from update {sync.start_step} on, parameters and more every {sync.every} updates instead"
    return Finding(OK, "traffic", text)

"""Checks before a long run: python train.py ... --doctor

Takes the real data, network and optimizer of the config for a few updates, in under a minute once the
data are cached, and says line by line what is fine, doubtful or wrong, and what to change.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich import box, console, table

import augment
import train
from experiment import Shared, bytes_beside_images, plan_length
from largebatch.data import batching
from largebatch.errors import UserError
from largebatch.hosts import collectives, memory, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim import optimizers
from largebatch.runs import checkpoints
from largebatch.training.state import TrainState, create_state
from largebatch.training.step import Batch, Plan, Step, make_inner_loop

OK, WARN, FAIL = "ok", "warn", "fail"
BUDGET_SEC = 40.0  # after which no further micro-batch size is tried
MAX_GRADIENT_ERROR = 0.02  # of the gradient's norm; rounding stays below, a sum in place of a mean is 1 or more
# Of an update's norm to its layer's: above the first training is torn about, below the last it stands still.
FAIL_UPDATE_RATIO, MAX_UPDATE_RATIO, MIN_UPDATE_RATIO = 1.0, 0.1, 1e-6
# You et al. 2020, section 3, clip it to such a range ("phi").
MIN_TRUST_RATIO, MAX_TRUST_RATIO = 1e-3, 10.0
BETTER = 1.1  # how much faster another micro-batch size must be to be worth a word
TIMED_SEC, TIMED_REPEATS = 0.5, 3


class Finding(NamedTuple):
    """One line: OK, WARN or FAIL, what was looked at, what was found, what to change."""

    status: str
    name: str
    found: str
    advice: str = ""


def examine(config) -> list[Finding]:
    """All findings about a config, on every host.

    Raises:
      UserError: the config or the data cannot be used at all.
    """
    started, clock = time.perf_counter(), Clock()
    sync, config = config.sync, config.copy_and_resolve_references()
    config.model.zero_head = False  # before it the first gradient would be zero, which says nothing
    config.sync.mode, config.sync.start_step = "every_step", 0  # looks at updates that all devices do together
    job, state = train.prepare(config, clock, Shared())
    start = replicas.first_replica(state)
    gradient = mean_gradient(job, start)
    findings = [check_gradient(job, start, gradient), check_update(job, config, start)]
    if config.optimizer.name == "lamb" and gradient is not None:
        findings.append(check_trust_ratios(gradient, start.params, config.optimizer.weight_decay))
    sizes = time_micro_batches(job, config, start, started)
    return [
        *findings,
        check_micro_batch(job, sizes),
        check_learning_rate(job, config),
        check_memory(job, state),
        estimate_time(job, config, state, sizes),
        count_bytes(job, sync),
    ]


# ---- gradients ------------------------------------------------------------------------------------


def _plan(job: train.Job, batch_size: int, learning_rate: float = 0.0, length: int = 1) -> Plan:
    starts = np.arange(length, dtype=np.int64) * batch_size
    place = batching.epoch_and_offset(job.placed.deal, starts)
    return Plan(*place, np.full(length, batch_size, np.int32), np.full(length, learning_rate, np.float32))


def even_share(job: train.Job) -> int:
    """Examples that every device can take of an even batch, a micro-batch at most; 0 if one holds none.

    Batches are even for sure as far as the full rounds of the first pass go.
    """
    deal = job.placed.deal
    return min(job.micro_batch_size, deal.num_originals // deal.num_devices)


def mean_gradient(job: train.Job, start: TrainState):
    """The gradient of `even_share` examples per device, the plain way: each device's mean, averaged over devices.

    None where there are no such examples.
    """
    deal, size = job.placed.deal, even_share(job)
    if not size:
        return None

    def gradient(state, data):
        device = lax.axis_index(replicas.AXIS)
        share = batching.device_share(deal, device, 0, 0, size * deal.num_devices)
        examples, visits, _ = batching.micro_batch(deal, device, share, 0, 1, size, jnp.uint32(0))
        batch = Batch(*job.programs.read(data, examples, visits), jnp.ones(size))
        grads, _ = jax.grad(job.programs.loss_fn, has_aux=True)(state.params, state.model_state, batch)
        return lax.pmean(jax.tree.map(lambda g: g / size, grads), replicas.AXIS)

    run = jax.pmap(gradient, replicas.AXIS, in_axes=(0, 0), out_axes=None)
    return jax.tree.map(np.asarray, run(replicas.replicate(start), job.placed.train))


def _norm(tree) -> float:
    return float(np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(tree))))


def check_gradient(job: train.Job, start: TrainState, expected) -> Finding:
    """The step's gradient is `expected`, from `mean_gradient`, and not a sum of means; replicas stay equal."""
    name, size = "gradient", even_share(job)
    if expected is None:
        deal = job.placed.deal
        found = f"not checked: {deal.num_originals} training images leave some of {deal.num_devices} devices idle"
        return Finding(WARN, name, found, "use fewer devices, or more images")
    # Plain SGD at rate 1: the update is the gradient.
    optimizer = optimizers.create_optimizer("sgd", optimizers.Numbers(momentum=0.0))
    programs = job.programs
    loop = make_inner_loop(Step(programs.loss_fn, optimizer, programs.read, job.placed.deal, size))
    state = replicas.replicate(create_state(start.params, optimizer, 0, start.model_state))
    plan = _plan(job, size * job.placed.deal.num_devices, learning_rate=1.0)
    state, _ = loop(state, job.placed.train, plan, np.int32(1))
    found = jax.tree.map(np.subtract, start.params, replicas.first_replica(state.params))
    ratio = _norm(found) / _norm(expected)
    error = _norm(jax.tree.map(np.subtract, found, expected)) / _norm(expected)
    text = f"reduced gradient is {ratio:.3f} x the mean over {job.placed.deal.num_devices} devices"
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


def check_update(job: train.Job, config, start: TrainState) -> Finding:
    """Norms of an update at the highest rate beside those of the parameters, layer by layer."""
    rate = float(job.schedule.rates(np.arange(job.schedule.num_updates)).max())
    batch_size = min(job.schedule.max_batch_size, job.micro_batch_size * job.placed.deal.num_devices * 4)
    plan = _plan(job, batch_size, rate, plan_length(config))  # as long as it was compiled for
    state = replicas.replicate(start)
    for _ in range(2 if config.optimizer.name == "soap" else 1):  # whose first one only looks at the gradient
        state, _ = job.programs.inner_loop(state, job.placed.train, plan, np.int32(1))
    moved = jax.tree.map(np.subtract, replicas.first_replica(state.params), start.params)
    moved, kernels = checkpoints.named_leaves(moved), _kernels(start.params)
    ratios = {name: _norm(moved[name]) / _norm(kernels[name]) for name in kernels if np.any(kernels[name])}
    return _judge_updates(ratios, rate)


def check_trust_ratios(gradient, params, weight_decay: float) -> Finding:
    """LAMB's trust ratios at the first update; a layer without a gradient has none."""
    kernels = _kernels(params)
    ratios = checkpoints.named_leaves(optimizers.trust_ratios(gradient, params, weight_decay))
    ratios = {layer: float(ratios[layer]) for layer in kernels}
    text, name = f"{_range_of(ratios)[0]} at the first update", "trust ratio"
    if dead := [layer for layer, ratio in ratios.items() if np.isinf(ratio)]:
        return Finding(WARN, name, text, f"no gradient reaches {', '.join(dead)}")
    if all(MIN_TRUST_RATIO <= ratio <= MAX_TRUST_RATIO for ratio in ratios.values()):
        return Finding(OK, name, text)
    allowed = f"allowed {MIN_TRUST_RATIO:g} to {MAX_TRUST_RATIO:g}"
    return Finding(WARN, name, text, f"{allowed}: look at the initialisation")


def _range_of(values: dict[str, float]) -> tuple[str, float, float]:
    low, high = min(values, key=values.get), max(values, key=values.get)
    return f"{values[low]:.2g} ({low}) to {values[high]:.2g} ({high})", values[low], values[high]


def _judge_updates(ratios: dict[str, float], learning_rate: float) -> Finding:
    text, low, high = _range_of(ratios)
    found, name = f"{text} of the kernels' norms", "first update"
    if not np.isfinite(high) or high > FAIL_UPDATE_RATIO:
        return Finding(FAIL, name, found, f"optimizer.learning_rate {learning_rate:g} is far too high")
    if high > MAX_UPDATE_RATIO:
        lower = learning_rate * MAX_UPDATE_RATIO / high
        return Finding(WARN, name, found, f"optimizer.learning_rate {learning_rate:g} is high: try {lower:.2g}")
    if low < MIN_UPDATE_RATIO:
        advice = f"optimizer.learning_rate {learning_rate:g} is low, or a layer gets no gradient"
        return Finding(WARN, name, found, advice)
    return Finding(OK, name, found)


def check_learning_rate(job: train.Job, config) -> Finding:
    """The rate that the updates will use."""
    epochs = job.schedule.examples_before(job.schedule.num_updates) / job.placed.deal.num_examples
    text = job.schedule.text.removeprefix("learning rate ")
    return Finding(OK, "learning rate", f"{text}; {_bound(job, config)}{epochs:,.1f} epochs")


def _bound(job: train.Job, config) -> str:
    """How what the schedule's updates come to stands to what the run will come to, where training decides that."""
    if config.batch.auto:
        return "at least "  # the batch grows
    if job.schedule.scale_invariant:  # an update of the reference batch or more is worth at least one
        sizes = job.schedule.batch_sizes.cut(job.schedule.num_updates).values
        return "at most " if sizes.min() >= config.schedule.reference_batch_size else "about "
    return ""


# ---- sizes ----------------------------------------------------------------------------------------


def time_micro_batches(job: train.Job, config, start: TrainState, started: float) -> dict[int, float | str]:
    """Seconds per example of all devices together by micro-batch size, or why a size does not run.

    Sizes take turns and the best of each counts, since a shared machine is only ever too slow.
    """
    own, deal, programs = job.micro_batch_size, job.placed.deal, job.programs
    share, num_rounds = -(-job.schedule.max_batch_size // deal.num_devices), 1
    batch_size = min(job.schedule.max_batch_size, deal.num_devices * own * 8)
    plan = _plan(job, batch_size, length=plan_length(config))  # as long as the loop was compiled for
    loops, found = {own: programs.inner_loop}, {}
    for size in (own // 2, own * 2):
        # On a pod a host that runs out of memory alone would leave the others in a collective.
        if 1 <= size <= share and jax.process_count() == 1:
            loops[size] = make_inner_loop(Step(programs.loss_fn, programs.optimizer, programs.read, deal, size))
    states = {size: replicas.replicate(start) for size in loops}
    for repeat in range(1 + TIMED_REPEATS):
        for size, loop in loops.items():
            late = bool(collectives.from_primary(np.int32(time.perf_counter() - started > BUDGET_SEC)))
            if isinstance(found.get(size), str) or (late and size not in found and size != own):
                continue
            begin = time.perf_counter()
            try:
                states[size], _ = loop(states[size], job.placed.train, plan, np.int32(num_rounds if repeat else 1))
                jax.block_until_ready(states[size])
            except jax.errors.JaxRuntimeError as error:
                found[size] = str(error).splitlines()[0][:120]
                continue
            seconds = time.perf_counter() - begin
            if repeat:
                found[size] = min(found[size], seconds / (num_rounds * batch_size))
            else:
                found[size] = np.inf  # that was the compilation
                if size == own:
                    num_rounds = int(np.clip(TIMED_SEC / seconds, 1, config.train.inner_steps))
                    num_rounds = int(collectives.from_primary(np.int32(num_rounds)))
    return found


def check_micro_batch(job: train.Job, sizes: dict[int, float | str]) -> Finding:
    """Whether the size fits, and whether half or twice of it is faster."""
    own, name = job.micro_batch_size, "micro-batch"
    if isinstance(sizes[own], str):
        advice = f"set batch.micro_batch_size {max(own // 2, 1)}"
        return Finding(FAIL, name, f"{own} does not run: {sizes[own]}", advice)
    timed = {size: 1 / sec for size, sec in sizes.items() if not isinstance(sec, str)}
    text = ", ".join(f"{size}: {timed[size]:,.0f}" for size in sorted(timed))
    best = max(timed, key=timed.get)
    text = f"{own} fits; images/s at size {text}"
    if job.programs.network.norm == "batch":
        return Finding(OK, name, f"{text}; another size is another normalisation")
    if timed[best] > BETTER * timed[own]:
        return Finding(WARN, name, text, f"set batch.micro_batch_size {best}")
    return Finding(OK, name, text)


def check_memory(job: train.Job, state) -> Finding:
    """The estimate of what a device needs, beside what it has."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    images = augment.bytes_per_device(job.cache, jax.device_count())
    beside = bytes_beside_images(job.programs.network, one, job.cache.image_shape, job.micro_batch_size)
    total, free = sum((images | beside).values()), memory.available_bytes()
    text = f"{total / 1e6:,.0f} MB a device, {sum(images.values()) / 1e6:,.0f} MB of it images"
    if free is None:
        return Finding(WARN, "memory", text, "this platform does not tell how much there is")
    text += f"; {free / 1e6:,.0f} MB free now"
    if sum(beside.values()) > free:
        return Finding(FAIL, "memory", text, "a smaller batch.micro_batch_size, or augment.storage on_device")
    return Finding(OK, "memory", text)


def estimate_time(job: train.Job, config, state, sizes: dict[int, float | str]) -> Finding:
    """Time of all updates and validations, from the times above."""
    if isinstance(sizes[job.micro_batch_size], str):
        return Finding(FAIL, "time", "unknown: no update ran")
    for _ in range(2):  # once to compile
        begin = time.perf_counter()
        train.validate_model(job, state)
        validation = time.perf_counter() - begin
    num_updates = job.schedule.num_updates
    trained = sizes[job.micro_batch_size] * job.schedule.examples_before(num_updates)
    update, validations = trained / num_updates, -(-num_updates // config.train.inner_steps)
    total = trained + validations * validation
    about = _bound(job, config) or "about "
    text = f"{about}{_duration(total)}: {_duration(update)} an update, {_duration(validation)} a validation"
    inner = config.train.inner_steps * update
    if validation > inner:
        return Finding(WARN, "time", text, "validations take most of it: raise train.inner_steps")
    return Finding(OK, "time", text)


def _duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (np.inf, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    raise ValueError(seconds)


def count_bytes(job: train.Job, sync) -> Finding:
    """What each device sends per update: a ring all-reduce of the gradient, unless devices take local steps."""
    num_devices = jax.device_count()
    sent = 2 * (num_devices - 1) / num_devices * job.programs.bytes_put_in[0]
    text = f"{sent / 1e6:.2f} MB sent by each of {num_devices} devices an update"
    if sync.mode != "every_step":
        text += f"; from update {sync.start_step} on, parameters and more every {sync.every} updates instead"
    return Finding(OK, "traffic", text)


# ---- the command ----------------------------------------------------------------------------------


def main(config) -> int:
    """Prints the findings; returns the exit code, 1 if any is a fail."""
    begin = time.perf_counter()
    findings = examine(config)
    if collectives.is_primary():
        out = console.Console(highlight=False, width=None if console.Console().is_terminal else 200)
        rows = table.Table(box=box.SIMPLE, show_header=False)
        colours = {OK: "green", WARN: "yellow", FAIL: "red"}
        for finding in findings:
            text = finding.found + (f"\n-> {finding.advice}" if finding.advice else "")
            rows.add_row(f"[{colours[finding.status]}]{finding.status}[/]", finding.name, text)
        out.print(rows)
        out.print(f"examined in {time.perf_counter() - begin:.0f} s; nothing was written to a run folder")
    if any(finding.status == FAIL for finding in findings):
        raise UserError("the doctor found what would fail; see above")
    return 0

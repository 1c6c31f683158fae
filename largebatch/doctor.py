"""Findings of `train.py --doctor` and `--compile_for`: what is fine, doubtful or wrong, and what to change.

The doctor runs the data, network and optimizer of a config for a few steps, in about a minute once the data are
cached. For hardware that is not attached it reads the compiled programs.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from rich import box, table
from rich.text import Text

from largebatch.data.cache_build import CachePlan
from largebatch.data.streaming import load_inputs
from largebatch.hardware.chips import Chip
from largebatch.hardware.compiled import CompiledProgram
from largebatch.hosts import collectives, memory, replicas
from largebatch.optim.optimizers import WITH_BASES
from largebatch.optim.schedules import StepInputs, epoch_and_offset
from largebatch.runs.display import LONG_RUN_SEC
from largebatch.terminal import Console, duration
from largebatch.training.costs import flops_utilisation
from largebatch.training.validation import validate
from largebatch.util import UserError

OK, WARN, FAIL = "ok", "warn", "fail"
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
# Limits of the ratio of a step's norm to its layer's: too high diverges, too low stands still.
FAIL_RATIO, HIGH_RATIO, LOW_RATIO = 1.0, 0.1, 1e-6
BUDGET_SEC = 40.0  # time after which no further micro-batch size is tried
BETTER = 1.1  # speed-up from which another micro-batch size is recommended
TIMED_SEC, TIMED_REPEATS = 0.5, 3
LARGEST = 6  # number of operations that are listed
# The compiler's cycles are a schedule, not a measurement; docs/hardware.md has the two known comparisons.
KNOWN_ERROR = "an estimate: where a v3-32 was measured, such cycles said 1.4 to 2.0 times the time"


class Finding(NamedTuple):
    """Line of a report: OK, WARN or FAIL, the subject of the check, an observation, and a recommended change."""

    status: str
    name: str
    text: str
    advice: str = ""


def show(findings: list[Finding], ending: str = "") -> None:
    """Print findings and a last line on the primary host.

    Raises:
      UserError: one of the findings is a fail.
    """
    if collectives.is_primary():
        out, rows = Console(), table.Table(box=box.SIMPLE, show_header=False)
        for status, name, text, advice in findings:
            rows.add_row(Text(status, style=COLOURS[status]), name, text + (f"\n-> {advice}" if advice else ""))
        out.print(rows)
        if ending:
            out.print(ending)
    if any(finding.status == FAIL for finding in findings):
        raise UserError("the doctor found what would fail; see above")


# ---- disk and memory ------------------------------------------------------------------------------------


def check_build(plan: CachePlan) -> Finding:
    """Compare the disk space that building a cache takes with what is free; write nothing."""
    layout = plan.layout
    height, width, channels = layout.image_shape
    free = shutil.disk_usage(next(folder for folder in plan.folder.parents if folder.exists())).free
    text = (
        f"{layout.num_rows:,} images of {height}x{width}x{channels} {layout.dtype}: "
        f"{plan.disk_bytes / 1e9:,.2f} GB on disk; {free / 1e9:,.2f} GB free"
    )
    if plan.disk_bytes > free:
        advice = "give an augment.cache_dir with more room, or a smaller dataset.image_size"
        return Finding(FAIL, "cache", text, advice)
    return Finding(OK, "cache", text)


def check_memory(storage: str, needed: dict[str, int]) -> Finding:
    """Tell the storage of the training images and the bytes on a device, by part; what does not fit was refused."""
    text = f"augment.storage {storage}: {_parts_text(needed)} a device"
    free = memory.available_bytes()
    if free is None:
        return Finding(WARN, "memory", text, "this platform does not tell how much memory there is")
    return Finding(OK, "memory", f"{text}; {_megabytes(free)} free now")


def _parts_text(parts: Mapping[str, int]) -> str:
    return f"{_megabytes(sum(parts.values()))} ({', '.join(f'{part} {_megabytes(parts[part])}' for part in parts)})"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds >= 10:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1e3 * seconds:.3g} ms"


# ---- a few steps ----------------------------------------------------------------------------------------


def check_first_step(run: Any) -> Finding:
    """Compare the norms of a step at the highest learning rate with those of the parameters, kernel by kernel.

    Args:
      run: a `build.Prepared` run.
    """
    plan, start = run.plan, replicas.first_replica(run.state)
    rate = float(plan.schedule.learning_rates(np.arange(plan.schedule.num_steps)).max())
    inputs = _inputs(plan, micro_batches=4, rate=rate)
    data, state = load_inputs(run.data.train, plan.sharding, start.seed, inputs).arrays, replicas.replicate(start)
    for _ in range(2 if plan.config.optimizer.name in WITH_BASES else 1):
        state, _ = run.programs.inner_loop(state, data, inputs, np.int32(1))
    ratios, kernels = {}, jax.tree_util.tree_leaves_with_path(start.params)
    for (path, before), after in zip(kernels, jax.tree.leaves(replicas.first_replica(state.params)), strict=True):
        if before.ndim > 1 and np.any(before):  # biases start at zero
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            ratios[name] = float(np.linalg.norm((after - before).ravel()) / np.linalg.norm(before.ravel()))
    lowest, highest = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    least, most = ratios[lowest], ratios[highest]
    text = f"{least:.2g} ({lowest}) to {most:.2g} ({highest}) of the kernels' norms"
    field = "optimizer.learning_rate"
    if not np.all(np.isfinite([*ratios.values()])) or most > FAIL_RATIO:
        return Finding(FAIL, "first step", text, f"{field} {rate:g} is far too high")
    if least < LOW_RATIO:
        return Finding(WARN, "first step", text, f"{field} {rate:g} is low, or {lowest} gets no gradient")
    if most > HIGH_RATIO:
        better = rate * HIGH_RATIO / most
        return Finding(WARN, "first step", text, f"{field} {rate:g} is high: try {better:.2g}")
    return Finding(OK, "first step", text)


def _inputs(plan: Any, micro_batches: int, rate: float = 0.0) -> StepInputs:
    """Make the inputs of as many steps as a call can do, of at most so many micro-batches a device."""
    batch_size = min(plan.schedule.max_batch_size, plan.micro_batch_size * plan.num_devices * micro_batches)
    length = plan.inputs_length
    epoch, offset = epoch_and_offset(np.arange(length, dtype=np.int64) * batch_size, plan.num_examples)
    sizes, rates = np.full(length, batch_size, np.int32), np.full(length, rate, np.float32)
    return StepInputs(epoch, offset, sizes, rates, b2=np.float32(plan.schedule.b2s(sizes)))


def time_micro_batches(run: Any, loops: Mapping[int, Callable], started: float) -> dict[int, float]:
    """Time steps in micro-batches of several sizes, which take turns: a shared machine is only ever too slow.

    Args:
      run: a `build.Prepared` run.
      loops: the run's inner loop by micro-batch size, its own first.
      started: time.perf_counter() when the examination began.
    Returns:
      Seconds per example of all devices together, by size; others than the run's own only where they fit, and
      where there was time for them.
    """
    plan, start = run.plan, replicas.first_replica(run.state)
    inputs, states, timings = _inputs(plan, micro_batches=8), {}, {}
    loaded = load_inputs(run.data.train, plan.sharding, start.seed, inputs)

    def seconds_of(size: int, num_steps: int) -> float:
        begin = time.perf_counter()
        states[size], _ = loops[size](states[size], loaded.arrays, inputs, np.int32(num_steps))
        jax.block_until_ready(states[size])
        return time.perf_counter() - begin

    for size in loops:
        if timings and time.perf_counter() - started > BUDGET_SEC:
            break
        states[size] = replicas.replicate(start)
        try:
            timings[size] = seconds_of(size, 1)  # which compiles it
        except jax.errors.JaxRuntimeError:
            if not timings:
                raise
    seconds = timings[plan.micro_batch_size]
    num_steps = np.clip(TIMED_SEC / seconds, 1, min(plan.config.train.inner_steps, loaded.num_steps))
    num_steps = int(collectives.from_primary(np.int32(num_steps)))
    rounds = [{size: seconds_of(size, num_steps) for size in timings} for _ in range(TIMED_REPEATS)]
    num_examples = num_steps * int(inputs.batch_size[0])
    return {size: min(one[size] for one in rounds) / num_examples for size in timings}


def check_micro_batch(plan: Any, timings: dict[int, float]) -> Finding:
    """Tell the speed of the run's micro-batch size, and recommend another of `timings` where that is faster."""
    own, best = plan.micro_batch_size, min(timings, key=timings.get)
    speeds = ", ".join(f"{size}: {1 / timings[size]:,.0f}" for size in sorted(timings))
    text = f"{own} fits; images/s in {plan.config.model.dtype} at size {speeds}"
    if timings[own] > BETTER * timings[best]:
        return Finding(WARN, "micro-batch", text, f"set batch.micro_batch_size {best}")
    return Finding(OK, "micro-batch", text)


def estimate_time(run: Any, seconds_per_example: float) -> Finding:
    """Estimate the time of all steps and validations of a run."""
    schedule, inner_steps = run.plan.schedule, run.plan.config.train.inner_steps
    for _ in range(2):  # once to compile
        begin = time.perf_counter()
        validate(run.programs, run.data, run.state)
        validation = time.perf_counter() - begin
    training = seconds_per_example * schedule.examples_before(schedule.num_steps)
    step, total = training / schedule.num_steps, training + -(-schedule.num_steps // inner_steps) * validation
    about = "at least" if run.plan.config.batch.auto else "about"  # whose batches grow
    text = f"{about} {duration(total)}: {_time(step)} a step, {_time(validation)} a validation"
    if validation > inner_steps * step:
        return Finding(WARN, "time", text, "validations take most of it: raise train.inner_steps")
    if total > LONG_RUN_SEC:
        return Finding(WARN, "time", text, "fewer train.outer_steps or a smaller batch.size take less")
    return Finding(OK, "time", text)


# ---- programs compiled for a target ---------------------------------------------------------------------


def check_programs(compiled: Any) -> list[Finding]:
    """Return all findings about an `examine.Compiled` config, whose hardware need not be attached."""
    findings, faults = [check_program_memory(compiled)], []
    for name, program in compiled.programs.items():
        faults += [f"{name} waits for the host: {transfer}" for transfer in program.host_transfers]
        if program.uses_float64:
            faults.append(f"{name} computes in float64")
        if name.endswith("step"):
            findings += describe_step(compiled, name)
            if not program.aliased_outputs:
                faults.append(f"{name} keeps two copies of the state")
        elif program.cycles:
            findings.append(Finding(OK, name, _cycles_text(compiled.target.chip, program)))
    sound = "no transfer to the host, no float64, the state is updated in place"
    return [*findings, Finding(FAIL if faults else OK, "programs", "; ".join(faults) or sound)]


def check_program_memory(compiled: Any) -> Finding:
    """Check that every program fits on a device, by the compiler's own figures beside the estimate."""
    sizes = {name: sum(program.memory.values()) for name, program in compiled.programs.items()}
    name, available = max(sizes, key=sizes.get), compiled.target.chip.memory_bytes
    parts, needed = _parts_text(compiled.programs[name].memory), _parts_text(compiled.needed)
    text = f"{_megabytes(available)} a device; {name} {parts}; estimated {needed}"
    if sizes[name] > available:
        too_much = _megabytes(sizes[name] - available)
        advice = f"{too_much} too much: a smaller batch.micro_batch_size, or an augment.storage that needs less"
        return Finding(FAIL, "memory", text, advice)
    return Finding(OK, "memory", text)


def describe_step(compiled: Any, name: str) -> list[Finding]:
    """List the collectives of a step, and its cycles by the compiler; on GPUs, which have none, its kernels."""
    plan, chip, program = compiled.plan, compiled.target.chip, compiled.programs[name]
    sent = [f"{one.opcode} of {_megabytes(one.bytes)}, {one.times:g} times" for one in program.collectives]
    advice = "one all-reduce a step is enough" if name == "step" and len(sent) > 1 else ""
    findings = [Finding(WARN if advice else OK, f"{name}: collectives", "; ".join(sent) or "none", advice)]

    batch_size, flops = plan.schedule.max_batch_size, compiled.flops_per_image
    share = plan.sharding.share_bounds(batch_size)[1]
    size = f"{batch_size:,} images, up to {share:,} a device in micro-batches of {plan.micro_batch_size:,}"
    needs = _roofline_text(chip, share * flops, program.moved_bytes)
    if program.cycles is None:
        loops = ", ".join(program.unknown_loops) or "none"
        launched = f"{program.num_operations:,.0f} kernels and calls; loops of a length known only there: {loops}"
        return [*findings, Finding(OK, name, f"{size}: {launched}; {needs}")]
    images_per_sec = batch_size / (program.cycles / chip.clock_hz)
    share_of_peak = flops_utilisation(flops, images_per_sec, compiled.target.hardware)
    speed = f"{images_per_sec:,.0f} images/s ({KNOWN_ERROR}), {share_of_peak:.0%} of the peak"
    largest = [
        f"{cost.share:4.0%}  {cost.cycles / 1e6:6.2f} M  {cost.operation or 'copies'}  {cost.source}"
        for cost in program.costs[:LARGEST]
    ]
    findings.append(Finding(OK, name, f"{size}: {_cycles_text(chip, program)}, {speed}; {needs}"))
    return [*findings, Finding(OK, f"{name}: largest", "\n".join(largest))]


def _roofline_text(chip: Chip, flops: float, moved_bytes: float) -> str:
    """Describe a device's FLOPs and bytes, and their minimum time (Williams et al. 2009, "Roofline")."""
    arithmetic, memory_sec = flops / chip.peak_flops, moved_bytes / chip.bytes_per_second
    bound = "arithmetic" if arithmetic > memory_sec else "memory"
    return (
        f"a device: {flops / 1e9:,.1f} GFLOP, {_time(arithmetic)} at the peak; "
        f"{moved_bytes / 1e9:,.2f} GB moved, {_time(memory_sec)} at the bandwidth; "
        f"so at least {_time(max(arithmetic, memory_sec))}, by {bound}"
    )


def _cycles_text(chip: Chip, program: CompiledProgram) -> str:
    return f"{program.cycles / 1e6:,.2f} M cycles = {_time(program.cycles / chip.clock_hz)}"

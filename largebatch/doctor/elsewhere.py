"""Findings about a run on compile targets, whose hardware need not be attached, from its compiled programs."""

from largebatch.doctor.findings import FAIL, OK, WARN, Finding, duration
from largebatch.hardware.compiled import CompiledProgram
from largebatch.hardware.targets import Target
from largebatch.training.costs import flops_utilisation

LARGEST = 6  # number of operations that are listed
# The compiler's cycles are a schedule, not a measurement; docs/hardware.md has the two known comparisons.
KNOWN_ERROR = "an estimate: where a v3-32 was measured, such cycles said 1.4 to 2.0 times the time"


def check_programs(
    plan,
    target: Target,
    programs: dict[str, CompiledProgram],
    needed: dict[str, int],
    flops_per_image: float,
) -> list[Finding]:
    """Return all findings about a config's programs, compiled for `target`.

    Args:
      needed: estimated bytes on a device by part, see `plan.needed_bytes`.
      flops_per_image: FLOPs of the network per image, forward and backward.
    """
    findings = [check_memory(target, programs, needed)]
    for name, program in programs.items():
        if name.endswith("update"):
            findings.append(check_traffic(name, program))
            findings += describe_update(plan, target, name, program, flops_per_image)
        elif program.cycles:
            findings.append(Finding(OK, name, _cycles_text(target, program)))
    findings.append(check_transfers(programs))
    return findings


def check_memory(target: Target, programs: dict[str, CompiledProgram], needed: dict[str, int]) -> Finding:
    """Check that every program fits on a device, by the compiler's own figures."""
    largest = max(programs, key=lambda name: sum(programs[name].memory.values()))
    memory, available = programs[largest].memory, target.chip.memory_bytes
    total = sum(memory.values())
    text = (
        f"{_megabytes(total)} of {_megabytes(available)} a device, in {largest}: arguments "
        f"{_megabytes(memory['arguments'])}, temporaries {_megabytes(memory['temporaries'])}, code "
        f"{_megabytes(memory['code'])}; estimated before: {_megabytes(sum(needed.values()))} ("
        + ", ".join(f"{name} {_megabytes(size)}" for name, size in needed.items())
        + ")"
    )
    if total > available:
        too_much = _megabytes(total - available)
        advice = f"{too_much} too much: a smaller batch.micro_batch_size, or an augment.storage that needs less"
        return Finding(FAIL, "memory", text, advice)
    return Finding(OK, "memory", text)


def check_traffic(name: str, program: CompiledProgram) -> Finding:
    """List the collectives of a step."""
    found = [f"{one.opcode} of {_megabytes(one.bytes)}, {one.times:g} times" for one in program.collectives]
    text = "; ".join(found) or "none"
    if name == "update" and len(program.collectives) > 1:
        return Finding(WARN, f"{name}: collectives", text, "one all-reduce an update is enough")
    return Finding(OK, f"{name}: collectives", text)


def check_transfers(programs: dict[str, CompiledProgram]) -> Finding:
    """Check that no transfer goes to the host, nothing is float64, and the state is updated in place."""
    faults = []
    for name, program in programs.items():
        faults += [f"{name} waits for the host: {transfer}" for transfer in program.host_transfers]
        if program.uses_float64:
            faults.append(f"{name} computes in float64")
        if name.endswith("update") and not program.aliased_outputs:
            faults.append(f"{name} keeps two copies of the state")
    if faults:
        return Finding(FAIL, "programs", "; ".join(faults))
    return Finding(OK, "programs", "no transfer to the host, no float64, the state is updated in place")


def describe_update(
    plan, target: Target, name: str, program: CompiledProgram, flops_per_image: float
) -> list[Finding]:
    """Describe the time of a step by the compiler, where it has cycles; on GPUs the launched kernels."""
    batch_size = plan.schedule.max_batch_size
    share = plan.sharding.share_bounds(batch_size)[1]
    size = f"{batch_size:,} images, up to {share:,} a device in micro-batches of {plan.micro_batch_size:,}"
    needs = _roofline_text(target, share * flops_per_image, program.moved_bytes)
    if program.cycles is None:
        loops = ", ".join(program.unknown_loops) or "none"
        launched = f"{program.num_operations:,.0f} kernels and calls; loops of a length known only there: {loops}"
        return [Finding(OK, name, f"{size}: {launched}; {needs}")]
    images_per_sec = batch_size / (program.cycles / target.chip.clock_hz)
    utilisation = flops_utilisation(flops_per_image, images_per_sec, target.hardware)
    text = (
        f"{size}: {_cycles_text(target, program)}, {images_per_sec:,.0f} images/s ({KNOWN_ERROR}), "
        f"{utilisation:.0%} of the peak; {needs}"
    )
    largest = [
        f"{cost.share:4.0%}  {cost.cycles / 1e6:6.2f} M  {cost.operation or 'copies'}  {cost.source}"
        for cost in program.costs[:LARGEST]
    ]
    return [Finding(OK, name, text), Finding(OK, f"{name}: largest", "\n".join(largest))]


def _roofline_text(target: Target, flops: float, moved_bytes: float) -> str:
    """Describe a device's FLOPs and bytes, and their minimum time (Williams et al. 2009, "Roofline")."""
    chip = target.chip
    arithmetic, memory = flops / chip.peak_flops, moved_bytes / chip.bytes_per_second
    bound = "arithmetic" if arithmetic > memory else "memory"
    return (
        f"a device: {flops / 1e9:,.1f} GFLOP, {duration(arithmetic)} at the peak; "
        f"{moved_bytes / 1e9:,.2f} GB moved, {duration(memory)} at the bandwidth; "
        f"so at least {duration(max(arithmetic, memory))}, by {bound}"
    )


def _cycles_text(target: Target, program: CompiledProgram) -> str:
    return f"{program.cycles / 1e6:,.2f} M cycles = {duration(program.cycles / target.chip.clock_hz)}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"

"""bench.py scaling: images/s over devices, at one batch size and at one per device, and the bytes between devices.

The devices are simulated: together they have the cores of this machine, so a constant rate is the best there is,
and what a rate loses is what the devices cost.
"""

from contextlib import ExitStack

from benchmarks.timing import Child, interleave

DEVICE_COUNTS = (1, 2, 4, 8, 16, 32)
STRONG_BATCH, WEAK_BATCH_PER_DEVICE = 2048, 64
FIELDS = {"model.dtype": "bfloat16", "batch.micro_batch_size": 16}


def bench_scaling(repeats: int, counts=DEVICE_COUNTS) -> dict:
    """Measure strong scaling, weak scaling (the batch grows with the devices), and what crosses devices."""
    rows = [{"devices": count} for count in counts]
    with ExitStack() as stack:
        variables = [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)} for count in counts]
        children = [stack.enter_context(Child("benchmarks.ours", **one)) for one in variables]
        for kind in ("strong", "weak"):
            sizes = [STRONG_BATCH if kind == "strong" else WEAK_BATCH_PER_DEVICE * count for count in counts]
            pairs = zip(children, sizes, strict=True)
            steps = [child.build("step", {"batch_size": size, **FIELDS}) for child, size in pairs]
            interleave(steps, repeats)
            for row, step in zip(rows, steps, strict=True):
                row[kind] = {"batch_size": step.options["batch_size"], **step.figures()}
        for row, step in zip(rows, steps, strict=True):
            facts = step.ask(ask="facts")
            row |= traffic(step.ask(ask="traffic")["collectives"], facts["params"], row["devices"])
    return {"command": "scaling", "rows": rows, "commit": facts["commit"], "versions": facts["versions"], **FIELDS}


def traffic(collectives: list[list], params: int, num_devices: int) -> dict:
    """Return the bytes that a device sends per step if all-reduces are rings, and those of the float32 gradient.

    Args:
      collectives: opcode, bytes that a device puts in, and executions per step.
    """
    ring = 2 * (num_devices - 1) / num_devices
    kinds = [opcode.removesuffix("-start") for opcode, _, _ in collectives]
    sizes = [size * times for _, size, times in collectives]
    reduced = sum(size for kind, size in zip(kinds, sizes, strict=True) if kind == "all-reduce")
    return {"collectives": kinds, "bytes_per_step": ring * reduced, "ring_formula": ring * 4 * params}


def print_scaling(result: dict) -> None:
    """Print the result of `bench_scaling`, a line per number of devices."""
    for row in result["rows"]:
        rates = [row[kind]["images_per_sec"] for kind in ("strong", "weak")]
        strong, weak = (f"{rate['median']:,.0f} ({rate['min']:,.0f}-{rate['max']:,.0f})" for rate in rates)
        sent = f"{row['bytes_per_step'] / 1e6:.4f} MB sent per step, ring formula {row['ring_formula'] / 1e6:.4f}"
        kinds = "+".join(row["collectives"])
        print(f"{row['devices']:>3} devices   strong {strong} images/s   weak {weak}   {kinds}, {sent}")

"""bench.py step: our training step beside peers, in one interleaved run, and as a share of the peak FLOP/s."""

import contextlib
import time

import numpy as np

from benchmarks.timing import Child, interleave, try_each

OURS, MINIMAL, TORCH = "benchmarks.ours", "benchmarks.peers.minimal_loop", "benchmarks.peers.torch_step"
AUTO = "ours, as train.py has it"
DTYPES = ("float32", "bfloat16")
SIZES_TRIED = 6  # micro-batches of a contender
MOST_OF_GRAPHS = 4096  # images of a batch in which launches are what limits PyTorch
MATMUL_SIZE = 2048


def bench_step(batch_size: int, repeats: int, minutes: float, *, peers: bool, kernels: bool) -> dict:
    """Time our step as train.py has it, its fastest variant, and each peer at its best.

    Args:
      batch_size: examples per step over all devices.
      minutes: after which no more options of variants and peers are tried.
      peers: time variants and peers too.
      kernels: profile our step.
    """
    started, tried, result = time.monotonic(), {}, {"command": "step", "batch_size": batch_size}
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Child(OURS))
        auto = ours.build(AUTO, {"batch_size": batch_size})
        contenders, facts = [auto], auto.ask(ask="facts")
        for name, module, choices, part in choices_of(batch_size, facts) if peers else ():
            child = ours if module == OURS else stack.enter_context(Child(module))
            best, tried[name] = try_each(child, choices, started + 60 * minutes * part)
            if best:
                best.name = describe(name, best.options)
                contenders.append(best)
        interleave(contenders, repeats)
        share = facts["share_of_peak"] or 1 / blas_flops_per_sec()
        result |= {"repeats": repeats, "ours": facts, "tried": tried, "rows": []}
        for one in contenders:
            figures, ratio = one.figures(), auto.ratio(one)
            of_peak = share * facts["flops_per_image"] * figures["images_per_sec"]["median"]
            row = {"name": one.name, "options": one.options, "of_peak": of_peak, "ours_beside_it": ratio}
            result["rows"].append(row | figures)
        result |= auto.ask(ask="kernels") if kernels else {}
    return result


def choices_of(batch_size: int, facts: dict) -> list[tuple[str, str, list[dict], float]]:
    """Return our variants and the peers: name, module, options to try, and the part of the time that is then over.

    Args:
      facts: of our step as train.py has it.
    """
    is_cpu, batch = facts["platform"] == "cpu", {"batch_size": batch_size}
    sizes = micro_batch_sizes(batch_size // facts["num_devices"], facts["platform"])
    changes = [{"batch.micro_batch_size": size} for size in sizes if size != facts["micro_batch_size"]]
    changes += [{"model.dtype": dtype} for dtype in DTYPES if dtype != facts["dtype"]]
    changes += [{"augment.storage": "on_device"}]
    # On CPUs XLA's convolutions take minutes, and in bfloat16 longer.
    changes += [] if is_cpu else [{"model.conv": conv} for conv in ("lax", "lax_blocks") if conv != facts["conv"]]
    plain = {**batch, "dtype": DTYPES[not is_cpu]}
    tuned = {**batch, "channels_last": True, "autocast": True, "compile": True, "cuda": not is_cpu}
    stem, graphs = {"stem_channels": 8}, {"mode": "reduce-overhead"}
    modes = [{}, stem] if is_cpu else [{}, stem, graphs] if batch_size > MOST_OF_GRAPHS else [graphs, stem, {}]
    sizes_of_torch = micro_batch_sizes(batch_size, facts["platform"])[:3]
    torch = [{**tuned, "micro_batch_size": size, **mode} for mode in modes for size in sizes_of_torch]
    torch += [{**torch[0], "mode": "", switch: False} for switch in ("compile", "autocast", "channels_last")]
    return [
        ("minimal.py", MINIMAL, [{**plain, "micro_batch_size": size} for size in sizes], 0.2),
        ("ours", OURS, [{**batch, **change} for change in changes], 0.5),
        ("PyTorch", TORCH, torch, 1.0),  # fails where it is not installed
    ]


def micro_batch_sizes(share: int, platform: str) -> list[int]:
    """Return divisors of a device's share worth trying, largest first, each at most half of the one before."""
    least, most = (8, 256) if platform == "cpu" else (256, 43_200)
    sizes = []
    for size in range(min(share, most), least - 1, -1):
        if share % size == 0 and (not sizes or 2 * size <= sizes[-1]):
            sizes.append(size)
    return sizes[:SIZES_TRIED] or [share]


def describe(name: str, options: dict) -> str:
    """Describe the options of a contender beside its batch size."""
    given = {key.split(".")[-1]: value for key, value in options.items() if key != "batch_size" and value}
    return ", ".join([name, *(key if value is True else f"{key} {value}" for key, value in given.items())])


def blas_flops_per_sec() -> float:
    """Return the FLOP/s of NumPy's float32 matrix product, the peak of a machine that nobody states."""
    a, seconds = np.ones((MATMUL_SIZE, MATMUL_SIZE), np.float32), []
    for _ in range(5):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return 2.0 * MATMUL_SIZE**3 / min(seconds)


def print_step(result: dict) -> None:
    """Print the result of `bench_step`, its rows as Markdown."""
    print(f"batch {result['batch_size']:,}, {result['repeats']} repeats; {result['ours']}\n")
    print("| | images/s (range) | ms | of the peak FLOP/s | ours / it |\n|---|---|---|---|---|")
    for row in result["rows"]:
        rate, ratio = row["images_per_sec"], row["ours_beside_it"]
        cells = [row["name"], f"{rate['median']:,.0f} ({rate['min']:,.0f}-{rate['max']:,.0f})"]
        cells += [f"{row['ms']['median']:,.2f}", f"{row['of_peak']:.2f}"]
        cells += [f"{ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f})"]
        print(f"| {' | '.join(cells)} |")
    for kernel in result.get("kernels", ())[:10]:
        print(f"{kernel['ms']:9.3f} ms {kernel['launches']:6g} launches  {kernel['name'][:60]}  {kernel['hlo']}")
    for name, tried in result["tried"].items():
        if all("error" in one for one in tried):
            print(f"{name}: {tried[0]['error']}")

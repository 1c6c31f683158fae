"""Throughput, memory and time to accuracy, beside the hardware limit and the peers.

    python bench.py step [--batch_size 512] [--repeats 7] [--nopeers] [--plot FILE.png]
    python bench.py input --path EuroSAT.zip
    python bench.py scaling [--plot FILE.png]
    python bench.py memory
    python bench.py accuracy --seeds 3 --target 0.9 --path runs/bench -- --config configs/eurosat.py ...
    python bench.py loop --path runs/eurosat
    python bench.py pack
    python bench.py noise [--batch_size 512] [--repeats 7]
    python bench.py growth

Every figure is of synchronised work, as a median over repeats with its spread; contenders take turns
within a repeat, so that a noisy machine is noisy to all. A contender whose work did not happen (its
parameters or update count stand still) is an error, not a figure. --json FILE keeps all of them.
"""

import contextlib
import json
import logging
import os
import sys

# Contenders share a GPU with PyTorch in a process of its own: nobody may take all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from absl import flags

from benchmarks import accuracy, growth, loop, memory, noise, pack, scaling, step
from benchmarks import input as inputs
from largebatch.cli import EXIT_FAILED, EXIT_USAGE, UsageError, parse_plain_flags
from largebatch.errors import UserError
from largebatch.runs.folder import jsonable


def _plot(name: str, result: dict, path: str) -> None:
    from benchmarks import plot

    {"step": plot.plot_step, "scaling": plot.plot_scaling}[name](result, path)


def define_flags() -> None:
    """The flags of all commands."""
    flags.DEFINE_integer("batch_size", 512, "step, noise: examples per update over all devices.", lower_bound=1)
    flags.DEFINE_integer("repeats", 7, "step, scaling, pack, noise: interleaved repeats.", lower_bound=1)
    flags.DEFINE_bool("peers", True, "step: time the peers too.")
    flags.DEFINE_integer("seeds", 3, "accuracy: runs.", lower_bound=1)
    flags.DEFINE_float("target", 0.9, "accuracy: validation accuracy to reach.", lower_bound=0, upper_bound=1)
    flags.DEFINE_string(
        "path", None, "input: EuroSAT.zip or its folder; loop: a run folder; accuracy: a new folder."
    )
    flags.DEFINE_string("json", None, "Write all figures to this file.")
    flags.DEFINE_string("plot", None, "step, scaling: draw the figures to this PNG.")


def make_commands(values, rest: list[str]) -> dict:
    """What each command runs and how it is printed."""
    return {
        "step": (lambda: step.bench_step(values.batch_size, values.repeats, values.peers), step.print_step),
        "input": (lambda: inputs.bench_input(values.path), inputs.print_input),
        "scaling": (lambda: scaling.bench_scaling(values.repeats), scaling.print_scaling),
        "memory": (memory.bench_memory, memory.print_memory),
        "accuracy": (
            lambda: accuracy.bench_accuracy(rest, values.seeds, values.target, values.path),
            accuracy.print_accuracy,
        ),
        "loop": (lambda: loop.bench_loop(values.path), loop.print_loop),
        "pack": (lambda: pack.bench_pack(values.repeats), pack.print_pack),
        "noise": (lambda: noise.bench_noise(values.batch_size, values.repeats), noise.print_noise),
        "growth": (growth.bench_growth, growth.print_growth),
    }


def main() -> int:
    """Runs one command; returns the exit code."""
    logging.basicConfig(format="%(message)s")
    define_flags()
    own, rest = sys.argv, []
    if "--" in sys.argv:
        cut = sys.argv.index("--")
        own, rest = sys.argv[:cut], sys.argv[cut + 1 :]
    values = flags.FLAGS
    commands = make_commands(values, rest)
    try:
        given = parse_plain_flags(own)
        if len(given) != 1 or given[0] not in commands:
            raise UsageError(f"give one command: {' | '.join(commands)}; found {' '.join(given) or 'none'}")
        (name,) = given
        if name in ("input", "loop", "accuracy") and not values.path:
            raise UsageError(
                "--path: not given; input needs EuroSAT.zip or its folder, loop and accuracy a run folder"
            )
        if rest and name != "accuracy":
            raise UsageError(f"--: only accuracy takes the arguments of train.py; found {' '.join(rest)}")
        if values.plot and name not in ("step", "scaling"):
            raise UsageError(f"--plot: {name} draws nothing; allowed with step and scaling")
    except UsageError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with contextlib.ExitStack() as stack:  # a file that cannot be written is found before the work
            file = stack.enter_context(open(values.json, "w")) if values.json else None
            if values.plot:
                stack.enter_context(open(values.plot, "wb"))
            bench, show = commands[name]
            result = bench()
            show(result)
            if file:
                json.dump(jsonable(result), file, indent=1, allow_nan=False)
        if values.plot:
            _plot(name, result, values.plot)
    except (UserError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

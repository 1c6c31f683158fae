"""Throughput, memory and time to accuracy, beside the hardware limit and the peers.

    python bench.py step [--batch_size 512] [--repeats 7] [--nopeers] [--plot FILE.png]
    python bench.py input --path EuroSAT.zip
    python bench.py stream --path EuroSAT.zip [--batch_size 512] [--repeats 7]
    python bench.py scaling [--plot FILE.png]
    python bench.py memory
    python bench.py accuracy --seeds 3 --target 0.9 --path runs/bench -- --config configs/eurosat.py ...
    python bench.py loop --path runs/eurosat
    python bench.py pack
    python bench.py noise [--batch_size 512] [--repeats 7]
    python bench.py growth [--targets v3:2x2,v3:4x4]
    python bench.py compile [--targets v3:4x4,h200] [--configs eurosat,eurosat_muon]
    python bench.py reading [--targets v3:4x4]
    python bench.py micro_batches [--targets v3:4x4] [--networks convnet,resnet8]
    python bench.py build --images 400000 --path /tmp
    python bench.py results --path runs/results --data DATA [--only recipes,knees]

Every figure is of synchronised work, as a median over repeats with its spread; contenders take turns
within a repeat, so that a noisy machine is noisy to all. A contender whose work did not happen (its
parameters or update count stand still) is an error, not a figure. --json FILE keeps all of them.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Contenders share a GPU with PyTorch in a process of its own: nobody may take all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from absl import flags

from benchmarks import (
    accuracy,
    compile,
    growth,
    inputs,
    large_set,
    loop,
    memory,
    micro_batches,
    noise,
    pack,
    reading,
    results,
    scaling,
    step,
    stream,
)
from largebatch.cli import EXIT_FAILED, EXIT_USAGE, UsageError, parse_plain_flags, path_flag
from largebatch.errors import UserError
from largebatch.runs.folder import jsonable


@dataclass(frozen=True)
class Command:
    """A command of bench.py.

    Attributes:
      measure: (flags, arguments of train.py) -> result, plain JSON.
      show: prints a result.
      needs_path: whether --path must be given.
      trains: whether it takes arguments of train.py behind --.
      plot: function of benchmarks/plot.py that draws the result; None where there is no picture.
    """

    measure: Callable[[Any, list[str]], dict]
    show: Callable[[dict], None]
    needs_path: bool = False
    trains: bool = False
    plot: str | None = None


COMMANDS = {
    "step": Command(
        lambda given, _: step.bench_step(given.batch_size, given.repeats, given.peers),
        step.print_step,
        plot="plot_step",
    ),
    "input": Command(lambda given, _: inputs.bench_input(given.path), inputs.print_input, needs_path=True),
    "stream": Command(
        lambda given, _: stream.bench_stream(given.path, given.cache_dir, given.batch_size, given.repeats),
        stream.print_stream,
        needs_path=True,
    ),
    "scaling": Command(
        lambda given, _: scaling.bench_scaling(given.repeats), scaling.print_scaling, plot="plot_scaling"
    ),
    "memory": Command(lambda *_: memory.bench_memory(), memory.print_memory),
    "accuracy": Command(
        lambda given, arguments: accuracy.bench_accuracy(arguments, given.seeds, given.target, given.path),
        accuracy.print_accuracy,
        needs_path=True,
        trains=True,
    ),
    "loop": Command(lambda given, _: loop.bench_loop(given.path), loop.print_loop, needs_path=True),
    "pack": Command(lambda given, _: pack.bench_pack(given.repeats), pack.print_pack),
    "noise": Command(lambda given, _: noise.bench_noise(given.batch_size, given.repeats), noise.print_noise),
    "build": Command(
        lambda given, _: large_set.bench_build(given.images, given.path, given.repeats), large_set.print_build
    ),
    "compile": Command(lambda given, _: compile.bench_compile(given.configs, given.targets), compile.print_compile),
    "micro_batches": Command(
        lambda given, _: micro_batches.bench_micro_batches(given.networks, given.targets),
        micro_batches.print_micro_batches,
    ),
    "reading": Command(lambda given, _: reading.bench_reading(given.targets), reading.print_reading),
    "growth": Command(lambda given, _: growth.bench_growth(given.targets), growth.print_growth),
    "results": Command(
        lambda given, _: results.bench_results(given.path, given.data, given.only),
        results.print_results,
        needs_path=True,
    ),
}


def define_flags() -> None:
    """The flags of all commands."""
    flags.DEFINE_integer(
        "batch_size", 512, "step, stream, noise: examples per update over all devices.", lower_bound=1
    )
    flags.DEFINE_integer("repeats", 7, "step, stream, scaling, pack, noise, build: repeats.", lower_bound=1)
    flags.DEFINE_bool("peers", True, "step: time the peers too.")
    flags.DEFINE_integer("images", 50_000, "build: generated images.", lower_bound=100)
    flags.DEFINE_integer("seeds", 3, "accuracy: runs.", lower_bound=1)
    flags.DEFINE_float("target", 0.9, "accuracy: validation accuracy to reach.", lower_bound=0, upper_bound=1)
    path_flag(
        "path",
        None,
        "input, stream: EuroSAT.zip or its folder; loop: a run folder; accuracy: a new folder; "
        "build: a folder with room; results: a folder for runs and studies.",
    )
    path_flag("data", ".", "results: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip.")
    flags.DEFINE_string("only", None, "results: its tables or jobs, with commas between; all by default.")
    path_flag("cache_dir", "~/.cache/largebatch", "stream: where the data cache is.")
    flags.DEFINE_string("configs", None, "compile: names of config files, with commas between; all by default.")
    flags.DEFINE_string("networks", None, "micro_batches: names of networks, with commas between; all by default.")
    flags.DEFINE_string(
        "targets",
        None,
        "compile, micro_batches, reading, growth: devices, with commas between; see train.py --compile_for.",
    )
    path_flag("json", None, "Write all figures to this file.")
    path_flag("plot", None, "step, scaling: draw the figures to this PNG.")


def parse_command(argv: list[str], train_arguments: list[str]) -> Command:
    """The command that `argv` asks for; its flags are then in flags.FLAGS.

    Raises:
      UsageError: unknown command or flag, or flags that do not go together.
    """
    given = flags.FLAGS
    names = parse_plain_flags(argv)
    if len(names) != 1 or names[0] not in COMMANDS:
        raise UsageError(f"give one command: {' | '.join(COMMANDS)}; found {' '.join(names) or 'none'}")
    (name,) = names
    command = COMMANDS[name]
    if command.needs_path and not given.path:
        raise UsageError(
            "--path: not given; input and stream need EuroSAT.zip or its folder, loop and accuracy a run folder, "
            "results a folder for all of its runs"
        )
    if train_arguments and not command.trains:
        raise UsageError(f"--: only accuracy takes the arguments of train.py; found {' '.join(train_arguments)}")
    if given.plot and not command.plot:
        raise UsageError(f"--plot: {name} draws nothing; allowed with step and scaling")
    return command


def run_command(command: Command, train_arguments: list[str]) -> None:
    """Measures, prints, and writes the files that --json and --plot name.

    Raises:
      UserError, OSError: something cannot be measured, or a file not be written.
    """
    given = flags.FLAGS
    with contextlib.ExitStack() as stack:  # a file that cannot be written is found before the work
        json_file = stack.enter_context(open(given.json, "w")) if given.json else None
        if given.plot:
            stack.enter_context(open(given.plot, "wb"))
        result = command.measure(given, train_arguments)
        command.show(result)
        if json_file:
            json.dump(jsonable(result), json_file, indent=1, allow_nan=False)
    if given.plot:
        from benchmarks import plot

        getattr(plot, command.plot)(result, given.plot)


def main() -> int:
    """Runs one command; returns the exit code."""
    logging.basicConfig(format="%(message)s")
    define_flags()
    argv, train_arguments = sys.argv, []
    if "--" in argv:
        cut = argv.index("--")
        argv, train_arguments = argv[:cut], argv[cut + 1 :]
    try:
        run_command(parse_command(argv, train_arguments), train_arguments)
    except UsageError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (UserError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

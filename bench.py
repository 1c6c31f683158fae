"""Throughput, memory and time to accuracy, beside the hardware limit and the peers.

    python bench.py step [--batch_size 512] [--repeats 7] [--nopeers] [--plot FILE.png]
    python bench.py input --path EuroSAT.zip
    python bench.py stream --path EuroSAT.zip [--batch_size 512] [--repeats 7]
    python bench.py scaling [--plot FILE.png]
    python bench.py memory
    python bench.py accuracy --seeds 3 --target 0.9 --path runs/bench -- --config configs/eurosat.py ...
    python bench.py loop --path runs/eurosat
    python bench.py noise [--batch_size 512] [--repeats 7]
    python bench.py growth [--targets v3:2x2,v3:4x4]
    python bench.py compile [--targets v3:4x4,h200] [--configs eurosat,eurosat_muon]
    python bench.py reading [--targets v3:4x4]
    python bench.py micro_batches [--targets v3:4x4] [--networks convnet,resnet8]
    python bench.py build --images 400000 --path /tmp
    python bench.py results --path runs/results --data DATA [--only recipes,knees]
    python bench.py card --minutes 10 --json card.json [--path EuroSAT.zip]
    python bench.py measured --path card.json

Every figure is of synchronised work, as a median over repeats with its spread; contenders take turns
within a repeat, so that a noisy machine is noisy to all. A contender whose work did not happen (its
parameters or update count stand still) is an error, not a figure. --json FILE keeps all of them.
"""

import contextlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Contenders share a GPU with PyTorch in a process of its own: nobody may take all of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from absl import flags

from largebatch.cli import EXIT_FAILED, EXIT_USAGE, UsageError, parse_plain_flags, path_flag
from largebatch.runs.folder import jsonable
from largebatch.util import UserError


@dataclass(frozen=True)
class Command:
    """A command of bench.py. Its module is imported when it is run, since packages that others need may be missing.

    Attributes:
      module: a file of benchmarks/, which has a function `print_` with the name of the command.
      measure: (module, flags, arguments of train.py) -> result, plain JSON.
      needs_path: whether --path must be given.
      trains: whether it takes arguments of train.py behind --.
      writes_json: whether it writes the file of --json by itself.
      plot: function of benchmarks/plot.py that draws the result; None where there is no picture.
    """

    module: str
    measure: Callable[[ModuleType, Any, list[str]], dict]
    needs_path: bool = False
    trains: bool = False
    writes_json: bool = False
    plot: str | None = None


COMMANDS = {
    "step": Command(
        "step",
        lambda step, given, _: step.bench_step(given.batch_size, given.repeats, given.peers),
        plot="plot_step",
    ),
    "input": Command("inputs", lambda inputs, given, _: inputs.bench_input(given.path), needs_path=True),
    "stream": Command(
        "stream",
        lambda stream, given, _: stream.bench_stream(given.path, given.cache_dir, given.batch_size, given.repeats),
        needs_path=True,
    ),
    "scaling": Command(
        "scaling", lambda scaling, given, _: scaling.bench_scaling(given.repeats), plot="plot_scaling"
    ),
    "memory": Command("memory", lambda memory, *_: memory.bench_memory()),
    "accuracy": Command(
        "accuracy",
        lambda accuracy, given, arguments: accuracy.bench_accuracy(
            arguments, given.seeds, given.target, given.path
        ),
        needs_path=True,
        trains=True,
    ),
    "loop": Command("loop", lambda loop, given, _: loop.bench_loop(given.path), needs_path=True),
    "noise": Command("noise", lambda noise, given, _: noise.bench_noise(given.batch_size, given.repeats)),
    "build": Command(
        "large_set",
        lambda large_set, given, _: large_set.bench_build(given.images, given.path, given.repeats),
    ),
    "compile": Command("compile", lambda compile, given, _: compile.bench_compile(given.configs, given.targets)),
    "micro_batches": Command(
        "micro_batches",
        lambda micro_batches, given, _: micro_batches.bench_micro_batches(given.networks, given.targets),
    ),
    "reading": Command("reading", lambda reading, given, _: reading.bench_reading(given.targets)),
    "growth": Command("growth", lambda growth, given, _: growth.bench_growth(given.targets)),
    "results": Command(
        "results",
        lambda results, given, _: results.bench_results(given.path, given.data, given.only),
        needs_path=True,
    ),
    "card": Command(
        "card",
        lambda card, given, _: card.bench_card(given.minutes, given.size, given.json, given.path, given.cifar10),
        writes_json=True,
    ),
    "measured": Command(
        "measured", lambda measured, given, _: measured.bench_measured(given.path), needs_path=True
    ),
}


def define_flags() -> None:
    """The flags of all commands."""
    flags.DEFINE_integer(
        "batch_size", 512, "step, stream, noise: examples per update over all devices.", lower_bound=1
    )
    flags.DEFINE_integer("repeats", 7, "step, stream, scaling, noise, build: repeats.", lower_bound=1)
    flags.DEFINE_bool("peers", True, "step: time the peers too.")
    flags.DEFINE_integer("images", 50_000, "build: generated images.", lower_bound=100)
    flags.DEFINE_integer("seeds", 3, "accuracy: runs.", lower_bound=1)
    flags.DEFINE_float("target", 0.9, "accuracy: validation accuracy to reach.", lower_bound=0, upper_bound=1)
    path_flag(
        "path",
        None,
        "input, stream: EuroSAT.zip or its folder; loop: a run folder; accuracy: a new folder; "
        "build: a folder with room; results: a folder for runs and studies; card: EuroSAT.zip, for the recipes; "
        "measured: what card wrote.",
    )
    path_flag("cifar10", None, "card: CIFAR-10-jpeg.zip, for its recipe.")
    flags.DEFINE_float("minutes", 10, "card: after which it ends.", lower_bound=0)
    flags.DEFINE_enum("size", None, ["card", "cpu", "tiny"], "card: its batch sizes; by the machine if not given.")
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


def parse_command(argv: list[str], train_arguments: list[str]) -> str:
    """The name of the command that `argv` asks for; its flags are then in flags.FLAGS.

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
            "results a folder for all of its runs, measured a file that card wrote"
        )
    if train_arguments and not command.trains:
        raise UsageError(f"--: only accuracy takes the arguments of train.py; found {' '.join(train_arguments)}")
    if given.plot and not command.plot:
        raise UsageError(f"--plot: {name} draws nothing; allowed with step and scaling")
    return name


def run_command(name: str, train_arguments: list[str]) -> None:
    """Measures, prints, and writes the files that --json and --plot name.

    Raises:
      UserError, OSError: something cannot be measured, or a file not be written.
    """
    given, command = flags.FLAGS, COMMANDS[name]
    module = importlib.import_module(f"benchmarks.{command.module}")
    with contextlib.ExitStack() as stack:  # a file that cannot be written is found before the work
        json_file = stack.enter_context(open(given.json, "w")) if given.json and not command.writes_json else None
        if given.plot:
            stack.enter_context(open(given.plot, "wb"))
        result = command.measure(module, given, train_arguments)
        getattr(module, f"print_{name}")(result)
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

"""Throughput beside the hardware limit and the peers, and what compilers say of other devices.

    python bench.py step [--batch_size 512] [--repeats 7] [--nopeers]
    python bench.py input --path EuroSAT.zip
    python bench.py stream --path EuroSAT.zip [--batch_size 512] [--repeats 7]
    python bench.py scaling
    python bench.py compile [--targets v3:4x4,h200] [--configs eurosat,eurosat_muon]
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
      measure: function of (module, flags) that returns the result as plain JSON.
      needs_path: True if --path must be given.
      writes_json: True if it writes the file of --json by itself.
    """

    module: str
    measure: Callable[[ModuleType, Any], dict]
    needs_path: bool = False
    writes_json: bool = False


COMMANDS = {
    "step": Command("step", lambda step, given: step.bench_step(given.batch_size, given.repeats, given.peers)),
    "input": Command("inputs", lambda inputs, given: inputs.bench_input(given.path), needs_path=True),
    "stream": Command(
        "stream",
        lambda stream, given: stream.bench_stream(given.path, given.cache_dir, given.batch_size, given.repeats),
        needs_path=True,
    ),
    "scaling": Command("scaling", lambda scaling, given: scaling.bench_scaling(given.repeats)),
    "compile": Command("compile", lambda compile, given: compile.bench_compile(given.configs, given.targets)),
    "results": Command(
        "results",
        lambda results, given: results.bench_results(given.path, given.data, given.only),
        needs_path=True,
    ),
    "card": Command(
        "card",
        lambda card, given: card.bench_card(given.minutes, given.size, given.json, given.path, given.cifar10),
        writes_json=True,
    ),
    "measured": Command("measured", lambda measured, given: measured.bench_measured(given.path), needs_path=True),
}


def define_flags() -> None:
    """Define the flags of all commands."""
    flags.DEFINE_integer("batch_size", 512, "step, stream: examples per step over all devices.", lower_bound=1)
    flags.DEFINE_integer("repeats", 7, "step, stream, scaling: repeats.", lower_bound=1)
    flags.DEFINE_bool("peers", True, "step: time the peers too.")
    path_flag(
        "path",
        None,
        "input, stream: EuroSAT.zip or its folder; results: a folder for runs and studies; card: EuroSAT.zip, for "
        "the recipes; measured: what card wrote.",
    )
    path_flag("cifar10", None, "card: CIFAR-10-jpeg.zip, for its recipe.")
    flags.DEFINE_float("minutes", 10, "card: after which it ends.", lower_bound=0)
    flags.DEFINE_enum("size", None, ["card", "cpu", "tiny"], "card: its batch sizes; by the machine if not given.")
    path_flag("data", ".", "results: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip.")
    flags.DEFINE_string("only", None, "results: its tables or jobs, with commas between; all by default.")
    path_flag("cache_dir", "~/.cache/largebatch", "stream: where the data cache is.")
    flags.DEFINE_string("configs", None, "compile: names of config files, with commas between; all by default.")
    flags.DEFINE_string("targets", None, "compile: devices, with commas between; see train.py --compile_for.")
    path_flag("json", None, "Write all figures to this file.")


def parse_command(argv: list[str]) -> str:
    """Return the name of the command that `argv` asks for; its flags are then in flags.FLAGS.

    Raises:
      UsageError: unknown command or flag, or flags that do not go together.
    """
    names = parse_plain_flags(argv)
    if len(names) != 1 or names[0] not in COMMANDS:
        raise UsageError(f"give one command: {' | '.join(COMMANDS)}; found {' '.join(names) or 'none'}")
    (name,) = names
    if COMMANDS[name].needs_path and not flags.FLAGS.path:
        raise UsageError(
            "--path: not given; input and stream need EuroSAT.zip or its folder, results a folder for all of its "
            "runs, measured a file that card wrote"
        )
    return name


def run_command(name: str) -> None:
    """Measure, print, and write the file that --json names.

    Raises:
      UserError, OSError: something cannot be measured, or the file not be written.
    """
    given, command = flags.FLAGS, COMMANDS[name]
    module = importlib.import_module(f"benchmarks.{command.module}")
    with contextlib.ExitStack() as stack:  # a file that cannot be written is found before the work
        json_file = stack.enter_context(open(given.json, "w")) if given.json and not command.writes_json else None
        result = command.measure(module, given)
        getattr(module, f"print_{name}")(result)
        if json_file:
            json.dump(jsonable(result), json_file, indent=1, allow_nan=False)


def main() -> int:
    """Run one command; return the exit code."""
    logging.basicConfig(format="%(message)s")
    define_flags()
    try:
        run_command(parse_command(sys.argv))
    except UsageError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (UserError, OSError) as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

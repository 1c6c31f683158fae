"""Throughput beside the hardware limit and the peers, and what it costs to start.

    python bench.py step [--batch_size 512] [--repeats 7] [--nopeers] [--kernels]
    python bench.py card --minutes 10 --json card.json [--data DATA]
    python bench.py input --path EuroSAT.zip
    python bench.py stream --path EuroSAT.zip [--batch_size 512] [--repeats 7]
    python bench.py scaling
    python bench.py compile [--configs eurosat_muon,eurosat_v3_32]
    python bench.py results --path runs/results --data DATA [--only recipes,critical_batch]

Every figure is of synchronised work, as a median over repeats with its spread; contenders take turns
within a repeat, so that a noisy machine is noisy to all. A contender whose work did not happen (its
parameters or step count stand still) is an error, not a figure. --json FILE keeps all figures.
"""

import importlib
import inspect
import json
import logging
import sys
from pathlib import Path

from absl import flags

from largebatch.cli import UsageError, exit_after, parse_plain_flags, path_flag
from largebatch.runs.folder import jsonable
from largebatch.util import UserError

# The module of each command. There `bench_NAME` takes flags by their names and returns plain JSON, which
# `print_NAME` prints.
COMMANDS = {
    "step": "step",
    "card": "card",
    "input": "inputs",
    "stream": "inputs",
    "scaling": "scaling",
    "compile": "compile",
    "results": "results",
}


def define_flags() -> None:
    """Define the flags of all commands."""
    flags.DEFINE_integer("batch_size", 512, "step, stream: examples per step over all devices.", lower_bound=1)
    flags.DEFINE_integer("repeats", 7, "step, stream, scaling: repeats.", lower_bound=1)
    flags.DEFINE_bool("peers", True, "step: time peers and our variants too.")
    flags.DEFINE_bool("kernels", False, "step: profile our step.")
    flags.DEFINE_float("minutes", 10, "card: when it ends; step: when no more options are tried.", lower_bound=0)
    flags.DEFINE_enum("size", "card", ["card", "cpu", "tiny"], "card: how large its measurements are.")
    path_flag("path", None, "input, stream: EuroSAT.zip or its folder; results: a folder for runs and studies.")
    path_flag("data", ".", "card, results: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip.")
    flags.DEFINE_string("only", None, "results: its tables or jobs, with commas between; all by default.")
    path_flag("cache_dir", "~/.cache/largebatch", "stream: where the data cache is.")
    flags.DEFINE_string("configs", None, "compile: names of config files, with commas between.")
    path_flag("json", None, "Write all figures to this file.")


def main() -> None:
    """Run one command: measure, print, and write the file of --json."""
    define_flags()
    names, given = parse_plain_flags(sys.argv), flags.FLAGS
    if len(names) != 1 or names[0] not in COMMANDS:
        raise UsageError(f"give one command: {' | '.join(COMMANDS)}; found {' '.join(names) or 'none'}")
    (name,) = names
    module = importlib.import_module(f"benchmarks.{COMMANDS[name]}")
    measure = getattr(module, f"bench_{name}")
    arguments = {flag: given[flag].value for flag in inspect.signature(measure).parameters if flag in given}
    if arguments.get("path", "given") is None:
        raise UsageError("--path: not given; input and stream need EuroSAT.zip, results a folder for its runs")
    if given.json:
        try:  # before the work
            Path(given.json).touch()
        except OSError as error:
            raise UserError(f"--json: {error}") from error
    result = measure(**arguments)
    getattr(module, f"print_{name}")(result)
    if given.json:
        Path(given.json).write_text(json.dumps(jsonable(result), indent=1, allow_nan=False))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    exit_after(main)

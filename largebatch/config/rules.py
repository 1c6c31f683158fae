"""Validation of the whole config, and how every script starts."""

import difflib
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_dict, config_flags

from largebatch.config.fields import differences, flatten
from largebatch.errors import BadSetting, UserError, printable
from largebatch.hosts import devices
from largebatch.optim import schedules, traces
from largebatch.optim.optimizers import OPTIMIZERS
from largebatch.runs import display

ROOT = Path(__file__).resolve().parents[2]
EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED = 1, 2, 3, 130, 143
AGREED_EXITS = (EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_PREEMPTED)

# Beyond it a float32, as the training state counts them in, no longer grows by 1.
MOST_SCALE_INVARIANT_STEPS = 2**24
SMALLEST_FLOAT32, LARGEST_FLOAT32 = (
    float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)

# What each network can be told, by its name; see `model.OPTIONS`.
Networks = Mapping[str, Collection[str]]
# (is it allowed?, what is allowed) for one value
Rule = tuple[Callable[[object], bool], str]


def _integer(low: int, high: int | None = None) -> Rule:
    def allowed(value):
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= (high or value)

    return allowed, f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"


def _number(low: float, high: float, text: str, *, open_low: bool = False, open_high: bool = False) -> Rule:
    """Of the value as training has it, in float32: 0.99999999 is 1 there, and 1e-50 is 0."""

    def allowed(value):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if not abs(value) <= LARGEST_FLOAT32:  # nan too
            return False
        rounded = float(np.float32(value)) if abs(value) >= SMALLEST_FLOAT32 else 0.0
        above = low < rounded if open_low else low <= rounded
        below = rounded < high if open_high else rounded <= high
        return above and below

    return allowed, f"{text} in float32"


def _one_of(*names: str) -> Rule:
    return lambda value: value in names, " | ".join(names)


def _or(rule: Rule, word: object) -> Rule:
    return lambda value: value == word or rule[0](value), f"{rule[1]}, or {word!r}"


_TEXT: Rule = (lambda value: isinstance(value, str) and bool(value.strip()), "a text")
_FLAG: Rule = (lambda value: isinstance(value, bool), "true | false")
_POSITIVE = _number(0, math.inf, "a number > 0", open_low=True)
_FRACTION = _number(0, 1, "a number from 0 to below 1", open_high=True)
_CUT = _number(0, 1, "a number above 0 and below 1", open_low=True, open_high=True)
_UPDATES: Rule = (
    lambda value: isinstance(value, tuple) and all(_integer(1)[0](one) for one in value),
    "a tuple of integers >= 1",
)

_TRACE: Rule = (
    lambda value: value is None or isinstance(value, list | tuple) or _TEXT[0](value),
    "a tuple of integers >= 1, the path of a CSV file, or None",
)

RULES: dict[str, Rule] = {
    "dataset.name": _TEXT,
    "dataset.source": _one_of("auto", "tfds", "zip", "folder", "synthetic"),
    "dataset.path": _or(_TEXT, None),
    "dataset.split_seed": _integer(0, 2**32 - 1),
    "dataset.image_size": _or(_integer(8, 1024), None),
    "dataset.tfds_split": _TEXT,
    "dataset.num_examples": _integer(50, 10_000_000),
    "dataset.max_image_pixels": _integer(1),
    "augment.storage": _one_of("expanded", "on_device"),
    "augment.shift": _integer(0),
    "augment.cache_dir": _TEXT,
    "model.name": _TEXT,  # and one of the networks that `validate` is given
    "model.dtype": _one_of("float32", "bfloat16"),
    "model.conv": _one_of("auto", "dot", "lax", "lax_padded"),
    "model.norm": _one_of("auto", "none", "batch", "group"),
    "model.norm_decay": _FRACTION,
    "model.stem": _one_of("conv", "whitened"),
    "model.zero_head": _FLAG,
    "batch.size": _or(_integer(1), "full"),
    "batch.micro_batch_size": _or(_integer(1), "auto"),
    "batch.trace": _TRACE,
    "batch.per_device_batch_size": _or(_integer(1), None),
    "batch.time_per_update": _POSITIVE,
    "batch.hold_last": _FLAG,
    "batch.auto": _FLAG,
    "batch.max_size": _or(_integer(1), "full"),
    "optimizer.name": _one_of(*OPTIMIZERS),
    "optimizer.learning_rate": _POSITIVE,
    "optimizer.momentum": _FRACTION,
    "optimizer.nesterov": _FLAG,
    "optimizer.momentum_correction": _FLAG,
    "optimizer.b2": _FRACTION,
    "optimizer.weight_decay": _number(0, math.inf, "a number >= 0"),
    "optimizer.exclude_biases": _FLAG,
    "optimizer.clip_norm": _or(_POSITIVE, None),
    "optimizer.bias_multiplier": _POSITIVE,
    "optimizer.adamw_multiplier": _POSITIVE,
    "schedule.name": _one_of(*schedules.NAMES),
    "schedule.scaling": _one_of(*schedules.SCALING),
    "schedule.reference_batch_size": _integer(1),
    "schedule.warmup_updates": _or(_integer(1), None),
    "schedule.warmup_epochs": _or(_POSITIVE, None),
    "schedule.warmup_examples": _or(_integer(1), None),
    "schedule.final_fraction": _number(0, 1, "a number from 0 to 1"),
    "schedule.decay_steps": _UPDATES,
    "schedule.decay_factor": _CUT,
    "schedule.decay_by": _one_of("rate", "batch"),
    "schedule.noise_decay": _FRACTION,
    "sync.mode": _one_of("every_step", "local", "post_local"),
    "sync.every": _integer(1),
    "sync.start_step": _integer(0),
    "sync.optimizer_state": _one_of("average", "keep", "reset"),
    "sync.outer_learning_rate": _POSITIVE,
    "sync.outer_momentum": _FRACTION,
    "train.inner_steps": _integer(1, 1_000_000),
    "train.outer_steps": _integer(1),
    "train.init_from": _or(_TEXT, None),
    "train.label_smoothing": _FRACTION,
    "train.ema_decay": _or(_FRACTION, None),
    "train.on_nonfinite": _one_of("stop", "skip", "rollback"),
    "train.max_nonfinite": _integer(1, 1_000_000),
    "train.rollback_factor": _CUT,
    "train.target_accuracy": _or(_number(0, 1, "a number above 0 and up to 1", open_low=True), None),
    "eval.view_average": _FLAG,
    "checkpoint.keep": _integer(1, 1_000_000),
    "checkpoint.every_outer": _integer(1),
    "checkpoint.every_sec": _number(0, math.inf, "a number >= 0"),
    "log.tensorboard": _FLAG,
    "devices.platform": _one_of("auto", "cpu", "gpu", "tpu"),
    "devices.coordinator_address": _or(_TEXT, None),
    "devices.num_hosts": _or(_integer(1), None),
    "devices.host_index": _or(_integer(0), None),
    "seed": _integer(0, 2**32 - 1),
}


def nearest(name: str, known) -> str:
    """ " (did you mean ...?)" when something close is known, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_field(field: str) -> str:
    """A known field with a similar last name in the same group, else one similar as a whole."""
    group, _, last = field.rpartition(".")
    same_group = {name.rpartition(".")[2]: name for name in RULES if name.rpartition(".")[0] == group}
    close = difflib.get_close_matches(last, same_group, n=1)
    return f" (did you mean {same_group[close[0]]!r}?)" if close else nearest(field, RULES)


def rules(networks: Networks) -> dict[str, Rule]:
    """The rule of every field."""
    return {**RULES, "model.name": _one_of(*networks)}


def validate(config: config_dict.ConfigDict, networks: Networks) -> None:
    """Checks every field before a device is touched.

    Raises:
      UserError: lists every problem, each with the field, the value given and what is allowed.
    """
    values, problems = flatten(config.to_dict()), []
    rule_of = rules(networks)
    for field in values.keys() - RULES.keys():
        problems.append(f"{field}: unknown field{nearest_field(field)}")
    for field, (allowed, text) in rule_of.items():
        if field not in values:
            problems.append(f"{field}: missing; allowed: {text}")
        elif not allowed(values[field]):
            names = text.split(" | ")
            hint = nearest(values[field], names) if len(names) > 1 else ""
            problems.append(f"{field}: {values[field]!r}; allowed: {text}{hint}")
    cluster = [f"devices.{name}" for name in ("coordinator_address", "num_hosts", "host_index")]
    given = [field for field in cluster if values.get(field) is not None]
    if len(given) == len(cluster):
        address, num_hosts, host_index = (values[field] for field in cluster)
        if not re.fullmatch(r"\S+:\d+", str(address)):
            problems.append(f"devices.coordinator_address: {address!r}; allowed: ADDRESS:PORT")
        if host_index >= num_hosts:
            problems.append(f"devices.host_index: {host_index}; allowed: 0 to devices.num_hosts - 1")
    elif given:
        problems.append(f"{', '.join(given)}: given alone; allowed: all of {', '.join(cluster)}, or none")
    if not problems:
        updates = config.train.inner_steps * config.train.outer_steps
        most = MOST_SCALE_INVARIANT_STEPS if config.schedule.scaling == "adascale" else traces.LARGEST
        if updates > most:
            problems.append(f"train.inner_steps x train.outer_steps: {updates}; allowed: up to {most}")
        problems += schedules.problems(config.schedule.to_dict(), updates)
        problems += [*_batch_problems(config, updates), *_sync_problems(config, updates)]
        if config.model.stem != "conv" and "stem" not in networks[config.model.name]:
            problems.append(f"model.stem: {config.model.stem!r}; allowed: 'conv' with model {config.model.name!r}")
    if problems:
        raise UserError("; ".join(sorted(problems)))


def _batch_problems(config, num_updates: int) -> list[str]:
    """What is contradictory about the batch sizes, and what is wrong with a trace."""
    fields, decay_by, found = config.batch, config.schedule.decay_by, []
    if fields.trace is not None and fields.auto:
        found.append("batch.trace and batch.auto: both given; allowed: one of them")
    if config.schedule.scaling == "adascale" and config.optimizer.name != "sgd":
        name = config.optimizer.name
        found.append(
            f"schedule.scaling: 'adascale', whose gain is sgd's; allowed: none | linear | sqrt with {name}"
        )
    for name in ("trace", "auto"):
        if fields[name] and decay_by == "batch":
            found.append(f"schedule.decay_by: 'batch'; allowed: 'rate' with batch.{name}")
    if not isinstance(fields.trace, str) and fields.per_device_batch_size is not None:
        found.append("batch.per_device_batch_size: given; allowed: with batch.trace, the path of a CSV file")
    if fields.hold_last and fields.trace is None:
        found.append("batch.hold_last: True; allowed: with batch.trace")
    if fields.max_size != "full" and not fields.auto:
        found.append(f"batch.max_size: {fields.max_size}; allowed: with batch.auto")
    if fields.trace is not None:
        try:
            trace = read_trace(fields)
        except BadSetting as problem:
            return [*found, str(problem)]
        if config.schedule.scaling == "adascale" and not fields.hold_last:
            found.append(
                "batch.hold_last: False; allowed: True with AdaScale, whose number of updates is not known"
            )
        elif trace.length < num_updates and not fields.hold_last:
            found.append(
                f"batch.trace: {trace.text}, ends with update {trace.length - 1:,}; allowed: up to the run's last, "
                f"{num_updates - 1:,}, or batch.hold_last"
            )
    return found


def _sync_problems(config, num_updates: int) -> list[str]:
    """What does not go with local steps."""
    fields, found = config.sync, []
    if fields.mode == "post_local" and not 1 <= fields.start_step < num_updates:
        found.append(f"sync.start_step: {fields.start_step}; allowed: 1 to {num_updates - 1} with 'post_local'")
    if fields.mode != "post_local" and fields.start_step:
        found.append(f"sync.start_step: {fields.start_step}; allowed: 0 with sync.mode {fields.mode!r}")
    if fields.mode == "every_step":
        for name, value in (("every", 1), ("outer_learning_rate", 1), ("outer_momentum", 0)):
            if fields[name] != value:
                found.append(f"sync.{name}: {fields[name]}; allowed: {value} with sync.mode 'every_step'")
        return found
    if config.optimizer.name == "soap" and fields.optimizer_state == "average":
        found.append("sync.optimizer_state: 'average'; allowed: keep | reset with soap, whose bases have no mean")
    if config.schedule.scaling == "adascale":
        found.append(f"schedule.scaling: 'adascale'; allowed: none | linear | sqrt with sync.mode {fields.mode!r}")
    if config.batch.auto:
        found.append(f"batch.auto: True; allowed: False with sync.mode {fields.mode!r}, which measures no noise")
    return found


def read_trace(fields: config_dict.ConfigDict, largest: int = traces.LARGEST) -> traces.Trace:
    """The trace that a config's `batch` names, of batches of at most `largest` examples.

    Raises:
      BadSetting: it is bad.
    """
    if isinstance(fields.trace, str):
        return traces.read_once(fields.trace, fields.per_device_batch_size, fields.time_per_update, largest)
    return traces.from_list(tuple(fields.trace), largest)


def resolve_batch_size(size, num_examples: int, field: str = "batch.size") -> int:
    """The number of examples that `field` means for a training set of `num_examples` views."""
    if size == "full":
        return num_examples
    if size > num_examples:
        raise BadSetting(
            f"{field}: {size}; allowed: an integer from 1 to {num_examples} (the training images x 8), or 'full'"
        )
    return size


def use_compilation_cache(cache_dir: str) -> None:
    """Keeps compiled programs between runs, where JAX_COMPILATION_CACHE_DIR says or else in `cache_dir`.

    The first call of a process decides, as it does in JAX. Programs are code: a script that takes its config from
    a folder that others may have made calls this before, with a `cache_dir` of the user's own.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(epath.Path(cache_dir).expanduser() / "xla"))
    # Small programs too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start(config: config_dict.ConfigDict, networks: Networks) -> dict:
    """Starts JAX by a config that all hosts agree on; returns it as plain JSON, as it will be read back.

    Raises:
      UserError: the config is bad, or another than host 0's; or the devices or hosts are not there.
    """
    validate(config, networks)
    use_compilation_cache(config.augment.cache_dir)
    devices.start(**config.devices.to_dict())
    plain = config.to_dict()
    plain["devices"]["host_index"] = None
    first, *others = map(json.loads, devices.gather_text(json.dumps(plain)))
    for host, theirs in enumerate(others, 1):
        if changed := differences(first, theirs, ("on host 0", f"on host {host}")):
            raise UserError(f"hosts disagree about the config: {changed}")
    return first


# ---- scripts ----------------------------------------------------------------------------------------


def run_script(main: Callable[[config_dict.ConfigDict], int | None], networks: Networks) -> NoReturn:
    """Parses --config and its overrides, validates, runs `main` and exits; see `exit_after`."""
    display.log_to_stderr()
    logging.getLogger("largebatch").setLevel(logging.INFO)

    def parse_and_run():
        config = parse_flags(sys.argv)
        validate(config, networks)
        return main(config)

    exit_after(parse_and_run)


def exit_after(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its code.

    What a user can mend (UsageError, UserError) is printed as one line on stderr, without a traceback.
    """
    script = Path(sys.argv[0]).name
    try:
        code = main() or 0
    except UsageError as error:
        print(f"{script}: {printable(error)}", file=sys.stderr)
        code = EXIT_USAGE
    except UserError as error:
        print(f"{script}: error: {printable(error)}", file=sys.stderr)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:  # a fault of ours: shown in full, and left by the same door
        traceback.print_exc()
        code = EXIT_FAILED
    if code not in (0, *AGREED_EXITS) and jax.distributed.is_initialized():
        # The usual way out waits for the other hosts, which may be waiting for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class UsageError(Exception):
    """The command line cannot be read; its text is one line."""


def parse_flags(argv: list[str]) -> config_dict.ConfigDict:
    """The config that `argv` asks for.

    Raises:
      UsageError: unknown or malformed flag, or a config file that cannot be run.
    """
    argv, unset = _without_nones(_join_values(argv))
    try:
        # Reads the overrides, of which the parser of flags then knows.
        default = str(ROOT / "configs" / "default.py")
        config_flags.DEFINE_config_file("config", default, "Config file.", sys_argv=argv)
        rest = parse_plain_flags(argv)
        if not isinstance(flags.FLAGS.config, config_dict.ConfigDict):  # what stands for a missing file
            raise UsageError(f"--config: {flags.FLAGS['config'].config_filename} cannot be loaded")
        flags.FLAGS.config.update_from_flattened_dict(dict.fromkeys(unset))
    except (AttributeError, KeyError) as error:  # config_flags: an override of a field that is not there
        names = [arg.split("=")[0].removeprefix("--config.") for arg in argv if arg.startswith("--config.")]
        bad = [f"--config.{name}: unknown field{nearest_field(name)}" for name in names if name not in RULES]
        raise UsageError("; ".join(bad) or f"--config: the file cannot be run: {_one_line(error)}") from error
    except UsageError:
        raise
    except Exception as error:  # whatever a user's config file raises when it is run
        raise UsageError(f"--config: the file cannot be run: {type(error).__name__}: {_one_line(error)}") from error
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; values are given as --config.FIELD VALUE")
    return flags.FLAGS.config


def parse_plain_flags(argv: list[str]) -> list[str]:
    """Parses absl flags; returns the arguments that are no flags.

    Raises:
      UsageError: unknown or malformed flag.
    """
    if "--help" in argv:
        print(f"{sys.modules['__main__'].__doc__ or ''}\n{flags.FLAGS.main_module_help()}")
        sys.exit(0)
    try:
        return flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise UsageError(_one_line(error)) from error


def _join_values(argv: list[str]) -> list[str]:
    """--config.a.b VALUE -> --config.a.b=VALUE.

    config_flags takes fields of mixed type (batch.size) for switches, whose value it would not read.
    """
    joined, pending = [], None
    for arg in argv:
        if pending is not None and not arg.startswith("--"):
            joined[-1] = f"{pending}={arg}"
            pending = None
            continue
        pending = arg if re.fullmatch(r"--config\.[\w.]+", arg) else None
        joined.append(arg)
    return joined


def _without_nones(argv: list[str]) -> tuple[list[str], list[str]]:
    """`argv` without its --config.FIELD=None, and those fields, which the parser of numbers does not take."""
    unset = {f"--config.{field}=None": field for field, (allowed, _) in RULES.items() if allowed(None)}
    return [arg for arg in argv if arg not in unset], [unset[arg] for arg in argv if arg in unset]


def _one_line(error: BaseException) -> str:
    # config_flags tells of a TypeError by a traceback, whose last line says it.
    before, _, trace = str(error).strip().partition("Traceback (most recent call last):")
    last = trace.splitlines()[-1] if trace else ""
    return " ".join(f"{before} {last}".split())

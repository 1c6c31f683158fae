"""What every field of a config may hold by itself."""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from largebatch.optim import schedule_options, schedules
from largebatch.optim.decay_steps import DECAY_BY
from largebatch.optim.optimizers import OPTIMIZERS
from largebatch.tasks.kinds import KINDS

SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Architecture(Protocol):
    """A network that a config can name: an entry of model.MODELS."""

    of_pixels: bool  # gives maps, for tasks of pixels
    options: Collection[str]  # which further fields of a config's `model` it takes: "norm", "stem", ...


# Fields of a config's `model` that only some networks take, each with the value that asks for nothing.
MODEL_OPTIONS = {"norm": "auto", "stem": "conv", "zero_head": False, "side_heads": False}
Models = Mapping[str, Architecture]  # by the name that a config's model.name has


@dataclass(frozen=True)
class Rule:
    """Which values a field may have."""

    allows: Callable[[object], bool]
    text: str  # what is allowed, for messages


def _integer(low: int, high: int | None = None) -> Rule:
    def allows(value):
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return low <= value and (high is None or value <= high)

    return Rule(allows, f"an integer >= {low}" if high is None else f"an integer from {low} to {high}")


def _number(low: float, high: float, text: str, *, open_low: bool = False, open_high: bool = False) -> Rule:
    """A rule for the value as training has it, in float32: there 0.99999999 is 1, and 1e-50 is 0."""

    def allows(value):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if not abs(value) <= LARGEST_FLOAT32:  # nan too
            return False
        rounded = float(np.float32(value)) if abs(value) >= SMALLEST_FLOAT32 else 0.0
        above = low < rounded if open_low else low <= rounded
        below = rounded < high if open_high else rounded <= high
        return above and below

    return Rule(allows, f"{text} in float32")


def _one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, " | ".join(names))


def _or(rule: Rule, word: object) -> Rule:
    return Rule(lambda value: value == word or rule.allows(value), f"{rule.text}, or {word!r}")


def _is_tuple_of_updates(value) -> bool:
    return isinstance(value, tuple) and all(_COUNT.allows(update) for update in value)


def _is_size(value) -> bool:
    """One side, or two, which a stored config holds as a list."""
    if isinstance(value, list | tuple):
        return len(value) == 2 and all(_SIDE.allows(side) for side in value)
    return value is None or _SIDE.allows(value)


def _is_project(value) -> bool:
    """What Weights & Biases takes as the name of a project."""
    return isinstance(value, str) and bool(value.strip()) and len(value) <= 128 and not set(value) & set("/\\#?%:")


def _is_trace(value) -> bool:
    """The sizes in a tuple are checked with the trace; see `validate`."""
    return value is None or isinstance(value, list | tuple) or _TEXT.allows(value)


_TEXT = Rule(lambda value: isinstance(value, str) and bool(value.strip()), "a text")
_FLAG = Rule(lambda value: isinstance(value, bool), "true | false")
_COUNT = _integer(1)
_SIDE = _integer(8, 1024)
_POSITIVE = _number(0, math.inf, "a number > 0", open_low=True)
_FRACTION = _number(0, 1, "a number from 0 to below 1", open_high=True)
_CUT = _number(0, 1, "a number above 0 and below 1", open_low=True, open_high=True)
_SHARE = _number(0, 1, "a number above 0 and up to 1", open_low=True)
_UPDATES = Rule(_is_tuple_of_updates, "a tuple of integers >= 1")
_TRACE = Rule(_is_trace, "a tuple of integers >= 1, the path of a CSV file, or None")

RULES: dict[str, Rule] = {
    "dataset.name": _TEXT,
    "dataset.source": _one_of("auto", "tfds", "zip", "folder", "synthetic"),
    "dataset.path": _or(_TEXT, None),
    "dataset.splits": _one_of("auto", "published", "own"),
    "dataset.split_file": _or(_TEXT, None),
    "dataset.split_seed": _integer(0, 2**32 - 1),
    "dataset.image_size": Rule(_is_size, "an integer from 8 to 1024, a tuple (height, width) of two, or None"),
    "dataset.resize": _one_of("stretch", "crop", "pad"),
    "dataset.channels": _or(_integer(1, 1024), None),
    "dataset.tfds_split": _or(_TEXT, None),
    "dataset.num_examples": _integer(50, 10_000_000),
    "dataset.max_image_pixels": _COUNT,
    "augment.storage": _one_of("auto", "expanded", "on_device", "streamed"),
    "augment.views": _one_of("all", "flip", "none"),
    "augment.crop_scale": _SHARE,
    "augment.shift": _integer(0),
    "augment.brightness": _number(0, 1, "a number from 0 to 1"),
    "augment.contrast": _number(0, 1, "a number from 0 to 1"),
    "augment.cutout": _integer(0),
    "augment.cache_dir": _TEXT,
    "task.name": _one_of(*KINDS),
    "task.mask_loss": _one_of("cross_entropy", "dice", "cross_entropy_dice", "focal"),
    "task.depth_loss": _one_of("l1", "berhu", "gradient"),
    "task.depth_weight": _POSITIVE,
    "model.name": _TEXT,  # `rules` has the networks
    "model.dtype": _one_of("auto", "float32", "bfloat16"),
    "model.conv": _one_of("auto", "dot", "lax", "lax_blocks"),
    "model.norm": _one_of("auto", "none", "batch", "group"),
    "model.norm_decay": _FRACTION,
    "model.stem": _one_of("conv", "whitened"),
    "model.zero_head": _FLAG,
    "model.side_heads": _FLAG,
    "batch.size": _or(_COUNT, "full"),
    "batch.micro_batch_size": _or(_COUNT, "auto"),
    "batch.ghost_size": _or(_integer(2), None),
    "batch.virtual_shards": _or(_COUNT, None),
    "batch.trace": _TRACE,
    "batch.per_device_batch_size": _or(_COUNT, None),
    "batch.time_per_update": _POSITIVE,
    "batch.hold_last": _FLAG,
    "batch.auto": _FLAG,
    "batch.max_size": _or(_COUNT, "full"),
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
    "optimizer.soap_every": _COUNT,
    "optimizer.adamw_multiplier": _POSITIVE,
    "schedule.name": _one_of(*schedule_options.NAMES),
    "schedule.scaling": _one_of(*schedules.SCALING),
    "schedule.b2_scaling": _one_of(*schedules.B2_SCALING),
    "schedule.reference_batch_size": _COUNT,
    "schedule.warmup_updates": _or(_COUNT, None),
    "schedule.warmup_epochs": _or(_POSITIVE, None),
    "schedule.warmup_examples": _or(_COUNT, None),
    "schedule.final_fraction": _number(0, 1, "a number from 0 to 1"),
    "schedule.decay_steps": _UPDATES,
    "schedule.decay_factor": _CUT,
    "schedule.decay_by": _one_of(*DECAY_BY),
    "schedule.decay_over": _one_of(*schedule_options.DECAY_OVER),
    "schedule.noise_decay": _FRACTION,
    "sync.mode": _one_of("every_step", "local", "post_local"),
    "sync.every": _COUNT,
    "sync.start_step": _integer(0),
    "sync.optimizer_state": _one_of("average", "keep", "reset"),
    "sync.outer_learning_rate": _POSITIVE,
    "sync.outer_momentum": _FRACTION,
    "train.inner_steps": _or(_integer(1, 1_000_000), "pass"),
    "train.outer_steps": _COUNT,
    "train.init_from": _or(_TEXT, None),
    "train.init_step": _or(_COUNT, None),
    "train.label_smoothing": _FRACTION,
    "train.ema_decay": _or(_FRACTION, None),
    "train.on_nonfinite": _one_of("stop", "skip", "rollback"),
    "train.max_nonfinite": _integer(1, 1_000_000),
    "train.rollback_factor": _CUT,
    "train.target_accuracy": _or(_SHARE, None),
    "train.target_score": _or(_number(-math.inf, math.inf, "a number"), None),
    "eval.view_average": _FLAG,
    "eval.shift_average": _integer(0),
    "checkpoint.keep": _integer(1, 1_000_000),
    "checkpoint.every_outer": _COUNT,
    "checkpoint.every_sec": _or(_number(0, math.inf, "a number >= 0"), "auto"),
    "log.noise_every": _or(_integer(0), "auto"),
    "log.tensorboard": _FLAG,
    "log.wandb": _FLAG,
    "log.wandb_project": Rule(_is_project, r"1 to 128 characters, none of / \ # ? % :"),
    "devices.platform": _one_of("auto", "cpu", "gpu", "tpu"),
    "devices.coordinator_address": _or(_TEXT, None),
    "devices.num_hosts": _or(_COUNT, None),
    "devices.host_index": _or(_integer(0), None),
    "devices.join_sec": _number(1, 86400, "a number of seconds, 1 to 86400"),
    "seed": _integer(0, 2**32 - 1),
}


# What fields are called elsewhere, by the last part of the name.
ALIASES = {
    "lr": "optimizer.learning_rate",
    "base_lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "l2": "optimizer.weight_decay",
    "b1": "optimizer.momentum",
    "beta1": "optimizer.momentum",
    "beta2": "optimizer.b2",
    "grad_clip": "optimizer.clip_norm",
    "clip": "optimizer.clip_norm",
    "bs": "batch.size",
    "batch_size": "batch.size",
    "global_batch_size": "batch.size",
    "epochs": "train.outer_steps",
    "num_epochs": "train.outer_steps",
    "steps": "train.inner_steps",
    "num_steps": "train.inner_steps",
    "iterations": "train.inner_steps",
    "warmup_steps": "schedule.warmup_updates",
    "warmup": "schedule.warmup_updates",
    "arch": "model.name",
    "precision": "model.dtype",
    "data_dir": "dataset.path",
    "resolution": "dataset.image_size",
}


def nearest(name: object, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" with the closest of the `known` names, or nothing if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_field(field: str) -> str:
    """Return " (did you mean ...?)" with the field that was probably meant, or nothing.

    By the last name: what it is called elsewhere, a close one of the same group, the same one of another group. By
    the whole name only where there is no such group.
    """
    group, _, last_name = field.rpartition(".")
    in_group = {name.rpartition(".")[2]: name for name in RULES if name.rpartition(".")[0] == group}
    same_name = [name for name in RULES if name.rpartition(".")[2] == last_name]
    close = difflib.get_close_matches(last_name, in_group, n=1)
    if last_name in ALIASES:
        meant = ALIASES[last_name]
    elif close or len(same_name) == 1:
        meant = in_group[close[0]] if close else same_name[0]
    else:
        return "" if in_group and group else nearest(field, RULES)
    return f" (did you mean {meant!r}?)"


def rules(models: Models) -> dict[str, Rule]:
    """The rule of every field, where these are the networks."""
    return {**RULES, "model.name": _one_of(*models)}

"""The checks of a whole config, before a device is touched."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from largebatch.config.dicts import FIELDS, RULES, SECTIONS, flatten, kinds_of
from largebatch.config.fields import Config
from largebatch.config.values import Rule
from largebatch.optim import traces
from largebatch.optim.schedules import WARMUPS
from largebatch.tasks.kinds import CLASSIFICATION, KINDS
from largebatch.util import BadSetting, UserError

# Fields of `model` that only some networks take, each with the value that asks for nothing.
MODEL_OPTIONS = {name: FIELDS[f"model.{name}"].default for name in ("norm", "stem", "zero_head", "side_heads")}
MOST_SCALE_INVARIANT_STEPS = 2**24  # beyond it the training state, which counts in float32, cannot add 1

# Fields by the names that they have elsewhere.
ALIASES = {
    **dict.fromkeys(("lr", "base_lr", "max_lr"), "optimizer.learning_rate"),
    **dict.fromkeys(("wd", "l2"), "optimizer.weight_decay"),
    **dict.fromkeys(("b1", "beta1"), "optimizer.momentum"),
    "beta2": "optimizer.b2",
    **dict.fromkeys(("grad_clip", "clip"), "optimizer.clip_norm"),
    **dict.fromkeys(("bs", "batch_size", "global_batch_size"), "batch.size"),
    **dict.fromkeys(("epochs", "num_epochs"), "train.outer_steps"),
    **dict.fromkeys(("steps", "num_steps", "iterations"), "train.inner_steps"),
    "warmup": "schedule.warmup_steps",
    "arch": "model.name",
    "precision": "model.dtype",
    "data_dir": "dataset.path",
    "resolution": "dataset.image_size",
}


# As model.MODELS: networks by name, with `of_pixels` (they give maps) and `options` (the MODEL_OPTIONS they take).
Models = Mapping[str, Any]


# ---- the whole config ----------------------------------------------------------------------------------


def check(values: dict, models: Models) -> Config:
    """Check nested dicts and make the Config of them.

    Args:
      values: fields by section and name.
      models: the networks that model.name may be, as model.MODELS.
    Raises:
      UserError: lists every problem, each with the field, the value given and what is allowed. Rules between fields
        are looked at once each field is allowed by itself.
    """
    flat = flatten(values)
    problems = list(_field_problems(flat, models))
    if not problems:
        config = _typed(flat)
        problems = list(itertools.chain.from_iterable(rule(config, models) for rule in _RULES_BETWEEN_FIELDS))
    if problems:
        raise UserError("; ".join(sorted(problems)))
    return config


def _typed(flat: dict[str, object]) -> Config:
    """Make the Config of fields that are allowed, with lists as tuples and floats where a field is a float."""
    sections: dict[str, dict] = {name: {} for name in SECTIONS}
    for name, value in flat.items():
        section, _, field = name.rpartition(".")
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, int) and not isinstance(value, bool) and float in kinds_of(FIELDS[name]):
            value = float(value)
        (sections[section] if section else sections)[field] = value
    return Config(**{name: SECTIONS[name](**of) if name in SECTIONS else of for name, of in sections.items()})


# ---- each field by itself -----------------------------------------------------------------------------


def rules(models: Models) -> dict[str, Rule]:
    """Return the rule of every field; model.name may be any of `models`."""
    names = Rule(lambda value: isinstance(value, str) and value in models, " | ".join(models))
    return {**RULES, "model.name": names}


def _field_problems(flat: dict[str, object], models: Models) -> Iterator[str]:
    allowed = rules(models)
    for field, value in flat.items():
        if field not in allowed:
            yield f"{field}: unknown field{nearest_field(field)}"
        elif not allowed[field].allows(value):
            names = allowed[field].text.split(" | ")
            hint = nearest(value, names) if len(names) > 1 else ""
            yield f"{field}: {value!r}; allowed: {allowed[field].text}{hint}"
    for field in allowed.keys() - flat.keys():
        yield f"{field}: missing; allowed: {allowed[field].text}"


def nearest(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the closest of the `known` names, or nothing if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_field(field: str) -> str:
    """Return " (did you mean ...?)" with the field that was probably meant, or nothing.

    The last part of the name decides: an alias, a close name of the same section, the same name of another section.
    The whole name decides only where there is no such section.
    """
    section, _, last_name = field.rpartition(".")
    in_section = {name.rpartition(".")[2]: name for name in RULES if name.rpartition(".")[0] == section}
    same_name = [name for name in RULES if name.rpartition(".")[2] == last_name]
    close = difflib.get_close_matches(last_name, in_section, n=1)
    if last_name in ALIASES:
        meant = ALIASES[last_name]
    elif close or len(same_name) == 1:
        meant = in_section[close[0]] if close else same_name[0]
    else:
        return "" if in_section and section else nearest(field, RULES)
    return f" (did you mean {meant!r}?)"


# ---- fields together ----------------------------------------------------------------------------------


def _bad(config: Config, field: str, allowed: str) -> str:
    section, _, name = field.partition(".")
    return f"{field}: {getattr(getattr(config, section), name)!r}; allowed: {allowed}"


def _dataset(config: Config, models: Models) -> Iterator[str]:
    dataset = config.dataset
    if dataset.splits == "own" and dataset.split_file is not None:
        yield _bad(config, "dataset.split_file", "None with dataset.splits 'own'")
    if dataset.splits == "published" and dataset.split_file is None and dataset.tfds_split is not None:
        yield _bad(
            config, "dataset.tfds_split", "None with dataset.splits 'published', which is not to be split by us"
        )
    if dataset.resize != "stretch" and dataset.image_size is None:
        yield _bad(config, "dataset.resize", "stretch without dataset.image_size")
    if config.eval.view_average and config.augment.views == "none":
        yield _bad(config, "eval.view_average", "False with augment.views 'none'")


def _model(config: Config, models: Models) -> Iterator[str]:
    kind, network = KINDS[config.task.name], models[config.model.name]
    for_task = f" with task.name {kind.name!r}"
    for name, unset in MODEL_OPTIONS.items():
        if getattr(config.model, name) != unset and name not in network.options:
            yield _bad(config, f"model.{name}", f"{unset!r} with model {config.model.name!r}")
    if network.of_pixels != kind.of_pixels:
        names = [name for name, other in models.items() if other.of_pixels == kind.of_pixels]
        yield _bad(config, "model.name", f"{' | '.join(names)}{for_task}")
    for field in ("task.mask_loss", "task.depth_loss", "task.depth_weight"):
        unset, name = FIELDS[field].default, field.partition(".")[2]
        if name not in kind.fields and getattr(config.task, name) != unset:
            yield _bad(config, field, f"{unset!r}{for_task}")
    if config.train.target_accuracy is not None and kind != CLASSIFICATION:
        yield _bad(config, "train.target_accuracy", f"train.target_score{for_task}")
    elif config.train.target_accuracy is not None and config.train.target_score is not None:
        yield _bad(config, "train.target_accuracy", f"one of it and train.target_score{for_task}")
    if kind.of_pixels and config.train.label_smoothing:
        yield _bad(config, "train.label_smoothing", f"0.0{for_task}")
    if kind.of_pixels and config.eval.shift_average:
        yield _bad(config, "eval.shift_average", f"0{for_task}")


def _batch(config: Config, models: Models) -> Iterator[str]:
    batch, norm = config.batch, config.model.norm
    if batch.trace is not None and batch.auto:
        yield "batch.trace and batch.auto: both given; allowed: one of them"
    if batch.per_device_batch_size is not None and (batch.auto or isinstance(batch.trace, tuple)):
        given = "batch.auto" if batch.auto else "a list as batch.trace"
        yield _bad(config, "batch.per_device_batch_size", f"None with {given}")
    if batch.hold_last and batch.trace is None:
        yield _bad(config, "batch.hold_last", "with batch.trace")
    if batch.max_size != "full" and not batch.auto:
        yield _bad(config, "batch.max_size", "with batch.auto")
    if batch.ghost_size is not None and norm != "batch":
        yield _bad(config, "batch.ghost_size", f"None with model.norm {norm!r}")
    ghost_size, micro_batch_size = batch.ghost_size, batch.micro_batch_size
    if ghost_size is not None and micro_batch_size != "auto" and micro_batch_size % ghost_size:
        yield _bad(config, "batch.micro_batch_size", f"a multiple of batch.ghost_size, {ghost_size}, or 'auto'")
    if config.log.noise_every == 0 and (batch.auto or config.schedule.scaling == "adascale"):
        needed_by = "batch.auto" if batch.auto else "schedule.scaling 'adascale'"
        yield _bad(config, "log.noise_every", f"an integer >= 1, or 'auto', with {needed_by}")


def _optimizer(config: Config, models: Models) -> Iterator[str]:
    name, schedule, sync = config.optimizer.name, config.schedule, config.sync
    if schedule.scaling == "adascale" and name != "sgd":
        yield _bad(config, "schedule.scaling", f"none | linear | sqrt with {name}, for its gain is that of sgd")
    if schedule.scaling == "adascale" and sync.mode != "every_step":
        yield _bad(config, "schedule.scaling", f"none | linear | sqrt with sync.mode {sync.mode!r}")
    if schedule.b2_scaling != "none" and name in ("sgd", "lars"):
        yield _bad(config, "schedule.b2_scaling", f"none with {name}, which has no second moment")
    if sync.mode != "post_local" and sync.start_step:
        yield _bad(config, "sync.start_step", f"0 with sync.mode {sync.mode!r}")
    if sync.mode == "every_step":
        for field in ("every", "outer_learning_rate", "outer_momentum"):
            if getattr(sync, field) != FIELDS[f"sync.{field}"].default:
                only = f"{FIELDS[f'sync.{field}'].default} with sync.mode 'every_step'"
                yield _bad(config, f"sync.{field}", only)
        return
    if name in ("soap", "soap_muon") and sync.optimizer_state == "average":
        yield _bad(config, "sync.optimizer_state", f"keep | reset with {name}, whose bases have no mean")
    if config.batch.auto:
        yield _bad(config, "batch.auto", f"False with sync.mode {sync.mode!r}, which measures no noise")


def _schedule(config: Config, models: Models) -> Iterator[str]:
    batch, schedule = config.batch, config.schedule
    given = [f"schedule.{field}" for field in WARMUPS if getattr(schedule, field) is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)}: both given; allowed: one of them"
    if schedule.name == "step" and not schedule.decay_steps:
        yield _bad(config, "schedule.decay_steps", "with schedule.name 'step', the steps at which to decay")
    if schedule.name != "step" and schedule.decay_steps:
        yield _bad(config, "schedule.decay_steps", f"() with schedule.name {schedule.name!r}")
    if any(later <= earlier for earlier, later in itertools.pairwise(schedule.decay_steps)):
        yield _bad(config, "schedule.decay_steps", "ascending")
    of_name = {"batch": ("step",), "seesaw": ("linear", "cosine", "step")}
    if schedule.name not in of_name.get(schedule.decay_by, (schedule.name,)):
        yield _bad(config, "schedule.decay_by", f"'rate' with schedule.name {schedule.name!r}")
    if schedule.decay_by != "rate" and schedule.scaling == "adascale":
        yield _bad(config, "schedule.decay_by", "'rate' with schedule.scaling 'adascale'")
    for field in ("trace", "auto", "per_device_batch_size"):
        if getattr(batch, field) and schedule.decay_by != "rate":
            yield _bad(config, "schedule.decay_by", f"'rate' with batch.{field}")
    is_smooth = schedule.name in ("linear", "cosine") and schedule.decay_by == "rate"
    if schedule.decay_over == "images" and (not is_smooth or schedule.scaling == "adascale"):
        yield _bad(config, "schedule.decay_over", "with name linear | cosine, decay_by rate and no adascale")
    found_in_training = batch.auto or (batch.trace is None and batch.per_device_batch_size is not None)
    if found_in_training and schedule.decay_over == "images":
        yield _bad(config, "schedule.decay_over", "'steps' where training finds the batch sizes")


def _length(config: Config, models: Models) -> Iterator[str]:
    if config.train.init_step is not None and config.train.init_from is None:
        yield _bad(config, "train.init_step", "with train.init_from")
    if config.train.inner_steps != "pass":
        yield from length_problems(config)
        return
    batch, schedule = config.batch, config.schedule
    changes = {
        "batch.trace": batch.trace is not None,
        "batch.auto": batch.auto,
        "batch.per_device_batch_size": batch.per_device_batch_size is not None,
        "schedule.scaling 'adascale'": schedule.scaling == "adascale",
        f"schedule.decay_by {schedule.decay_by!r}": schedule.decay_by != "rate",
    }
    if any(changes.values()):  # the steps of a pass would differ from one pass to the next
        found = ", ".join(name for name, is_on in changes.items() if is_on)
        yield _bad(config, "train.inner_steps", f"an integer from 1 to 1000000 with {found}")


def length_problems(config: Config) -> Iterator[str]:
    """Yield the problems with the number of steps; called again where that follows from the data set."""
    num_steps, schedule, batch = config.train.inner_steps * config.train.outer_steps, config.schedule, config.batch
    most = MOST_SCALE_INVARIANT_STEPS if schedule.scaling == "adascale" else traces.LARGEST
    if num_steps > most:
        yield f"train.inner_steps x train.outer_steps: {num_steps}; allowed: up to {most}"
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if warmup is not None and warmup >= num_steps:
        yield _bad(config, "schedule.warmup_steps", f"fewer than the run's {num_steps} steps")
    if decay and not max(decay) < num_steps:
        yield _bad(config, "schedule.decay_steps", f"within the run's {num_steps} steps")
    elif decay and warmup is not None and warmup > decay[0]:
        yield _bad(config, "schedule.warmup_steps", f"up to the first decay, at {decay[0]}")
    if config.sync.mode == "post_local" and not 1 <= config.sync.start_step < num_steps:
        yield _bad(config, "sync.start_step", f"1 to {num_steps - 1} with 'post_local'")
    if batch.trace is None:
        return
    try:
        trace = traces.read_trace(batch)
    except BadSetting as problem:
        yield str(problem)
        return
    if schedule.scaling == "adascale" and not batch.hold_last:
        yield _bad(config, "batch.hold_last", "True with AdaScale, whose number of steps is not known")
    elif trace.length < num_steps and not batch.hold_last:
        yield (
            f"batch.trace: {trace.text}, ends with step {trace.length - 1:,}; allowed: up to the run's last, "
            f"{num_steps - 1:,}, or batch.hold_last"
        )


def _devices(config: Config, models: Models) -> Iterator[str]:
    devices = config.devices
    if devices.coordinator_address is not None and not _is_address(devices.coordinator_address):
        yield _bad(config, "devices.coordinator_address", "HOST:PORT, HOST or :PORT")
    if None not in (devices.host_index, devices.num_hosts) and devices.host_index >= devices.num_hosts:
        yield _bad(config, "devices.host_index", "0 to devices.num_hosts - 1")


def _is_address(address: str) -> bool:
    """Tell whether this is "HOST:PORT", "HOST" or ":PORT"; an IPv6 address stands in brackets."""
    found = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]*)(?::(?P<port>\d{1,5}))?", address)
    return bool(address) and found is not None and 1 <= int(found["port"] or 1) <= 65535


_RULES_BETWEEN_FIELDS: tuple[Callable[[Config, Models], Iterator[str]], ...] = (
    _dataset,
    _model,
    _batch,
    _optimizer,
    _schedule,
    _length,
    _devices,
)

"""Validation of a whole config, before a device is touched."""

import re
from typing import TYPE_CHECKING

from largebatch.config.fields import MISSING_FIELDS, flatten
from largebatch.config.rules import MODEL_OPTIONS, RULES, Models, nearest, nearest_field, rules
from largebatch.errors import BadSetting, UserError
from largebatch.optim import noise_scale, schedule_options, traces
from largebatch.optim.batch_sizes import are_found_in_training, read_trace
from largebatch.optim.optimizers import WITH_BASES
from largebatch.optim.schedule_options import ScheduleOptions
from largebatch.tasks.kinds import CLASSIFICATION, KINDS

if TYPE_CHECKING:  # bench.py measures cards where ml_collections is missing
    from ml_collections import config_dict

# Beyond it a float32, as the training state counts them in, no longer grows by 1.
MOST_SCALE_INVARIANT_STEPS = 2**24

CLUSTER_FIELDS = ("devices.coordinator_address", "devices.num_hosts", "devices.host_index")


def validate(config: "config_dict.ConfigDict", models: Models) -> None:
    """Checks every field by itself, and if all are allowed, how they go together.

    Args:
      models: the networks that model.name may be, as model.MODELS.
    Raises:
      UserError: lists every problem, each with the field, the value given and what is allowed.
    """
    values = flatten(config.to_dict())
    problems = [*_field_problems(values, models), *_cluster_problems(values)]
    if not problems:
        problems = [
            *_split_problems(config),
            *_resize_problems(config),
            *length_problems(config),
            *_adascale_problems(config),
            *_b2_problems(config),
            *_batch_problems(config),
            *_ghost_problems(config),
            *_noise_problems(config),
            *_sync_problems(config),
            *_model_problems(config, models),
            *_view_problems(config),
            *_task_problems(config, models),
            *_init_problems(config),
        ]
    if problems:
        raise UserError("; ".join(sorted(problems)))


def length_problems(config) -> list[str]:
    """Return what does not go with the number of updates.

    With train.inner_steps "pass" that number is known once the data are: `resolve.resolve_setup` asks again then.
    """
    if config.train.inner_steps == "pass":
        return _pass_problems(config)
    num_updates = config.train.inner_steps * config.train.outer_steps
    return [
        *_count_problems(config, num_updates),
        *schedule_options.problems(ScheduleOptions.from_config(config.schedule), num_updates),
        *_trace_problems(config, num_updates),
        *_local_start_problems(config, num_updates),
    ]


def _pass_problems(config) -> list[str]:
    """Return what makes the updates of a pass over the images differ from one pass to the next."""
    changes = {
        "batch.trace": config.batch.trace is not None,
        "batch.auto": config.batch.auto,
        "batch.per_device_batch_size": config.batch.per_device_batch_size is not None,
        "schedule.scaling 'adascale'": config.schedule.scaling == "adascale",
        f"schedule.decay_by {config.schedule.decay_by!r}": config.schedule.decay_by != "rate",
    }
    found = [name for name, is_on in changes.items() if is_on]
    if not found:
        return []
    return [f"train.inner_steps: 'pass'; allowed: an integer from 1 to 1000000 with {', '.join(found)}"]


def _field_problems(values: dict[str, object], models: Models) -> list[str]:
    """Fields that are unknown, missing or hold what they may not."""
    problems = [f"{field}: unknown field{nearest_field(field)}" for field in values.keys() - RULES.keys()]
    for field, rule in rules(models).items():
        if field not in values:
            problems.append(f"{field}: missing; allowed: {rule.text}")
        elif not rule.allows(values[field]):
            names = rule.text.split(" | ")
            hint = nearest(values[field], names) if len(names) > 1 else ""
            problems.append(f"{field}: {values[field]!r}; allowed: {rule.text}{hint}")
    return problems


def _cluster_problems(values: dict[str, object]) -> list[str]:
    """Where the hosts meet. Whether what is not given can be found is known when JAX is started."""
    address, num_hosts, host_index = (values.get(field) for field in CLUSTER_FIELDS)
    problems = []
    if address is not None and not _is_address(str(address)):
        problems.append(f"devices.coordinator_address: {address!r}; allowed: HOST:PORT, HOST or :PORT")
    if isinstance(host_index, int) and isinstance(num_hosts, int) and host_index >= num_hosts:
        problems.append(f"devices.host_index: {host_index}; allowed: 0 to devices.num_hosts - 1")
    return problems


def _is_address(text: str) -> bool:
    """ "HOST:PORT", "HOST" or ":PORT", where an IPv6 address stands in brackets."""
    found = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]*)(?::(?P<port>\d{1,5}))?", text)
    return bool(text) and found is not None and 1 <= int(found["port"] or 1) <= 65535


def _split_problems(config) -> list[str]:
    """Splits that are given, but not to be taken."""
    dataset, problems = config.dataset, []
    if dataset.splits == "own" and dataset.split_file is not None:
        problems.append(f"dataset.split_file: {dataset.split_file!r}; allowed: None with dataset.splits 'own'")
    if dataset.splits == "published" and dataset.split_file is None and dataset.tfds_split is not None:
        problems.append(
            f"dataset.tfds_split: {dataset.tfds_split!r}, which is to be split by us; allowed: None with "
            "dataset.splits 'published'"
        )
    return problems


def _resize_problems(config) -> list[str]:
    """A way to resize where nothing is resized."""
    resize = config.dataset.resize
    if resize != "stretch" and config.dataset.image_size is None:
        return [f"dataset.resize: {resize!r}; allowed: stretch without dataset.image_size"]
    return []


def _count_problems(config, num_updates: int) -> list[str]:
    """More updates than the training state can count."""
    limit = MOST_SCALE_INVARIANT_STEPS if config.schedule.scaling == "adascale" else traces.LARGEST
    if num_updates <= limit:
        return []
    return [f"train.inner_steps x train.outer_steps: {num_updates}; allowed: up to {limit}"]


def _adascale_problems(config) -> list[str]:
    """What does not go with AdaScale."""
    if config.schedule.scaling != "adascale":
        return []
    problems = []
    if config.optimizer.name != "sgd":
        problems.append(
            "schedule.scaling: 'adascale', whose gain is sgd's; allowed: none | linear | sqrt with "
            f"{config.optimizer.name}"
        )
    if config.sync.mode != "every_step":
        problems.append(
            f"schedule.scaling: 'adascale'; allowed: none | linear | sqrt with sync.mode {config.sync.mode!r}"
        )
    return problems


def _b2_problems(config) -> list[str]:
    """A rule for the second moment of an optimizer that has none."""
    name, rule = config.optimizer.name, config.schedule.b2_scaling
    if rule == "none" or name not in ("sgd", "lars"):
        return []
    return [f"schedule.b2_scaling: {rule!r}; allowed: none with {name}, which has no second moment"]


def _batch_problems(config) -> list[str]:
    """Fields that say contradictory things about the batch size."""
    batch, problems = config.batch, []
    if batch.trace is not None and batch.auto:
        problems.append("batch.trace and batch.auto: both given; allowed: one of them")
    for name in ("trace", "auto", "per_device_batch_size"):
        if batch[name] and config.schedule.decay_by != "rate":
            problems.append(f"schedule.decay_by: {config.schedule.decay_by!r}; allowed: 'rate' with batch.{name}")
    if are_found_in_training(batch) and config.schedule.decay_over == "images":
        problems.append("schedule.decay_over: 'images'; allowed: 'updates' where training finds the batch sizes")
    if batch.per_device_batch_size is not None and (batch.auto or isinstance(batch.trace, list | tuple)):
        given = "batch.auto" if batch.auto else "a list as batch.trace"
        problems.append(f"batch.per_device_batch_size: {batch.per_device_batch_size}; allowed: None with {given}")
    if batch.hold_last and batch.trace is None:
        problems.append("batch.hold_last: True; allowed: with batch.trace")
    if batch.max_size != "full" and not batch.auto:
        problems.append(f"batch.max_size: {batch.max_size}; allowed: with batch.auto")
    return problems


def _ghost_problems(config) -> list[str]:
    """Ghost batches where nothing is normalised by them, or micro-batches that would cut them."""
    batch, norm, problems = config.batch, config.model.norm, []
    if batch.ghost_size is None:
        return problems
    if norm != "batch":
        problems.append(f"batch.ghost_size: {batch.ghost_size}; allowed: None with model.norm {norm!r}")
    if batch.micro_batch_size != "auto" and batch.micro_batch_size % batch.ghost_size:
        problems.append(
            f"batch.micro_batch_size: {batch.micro_batch_size}; allowed: a multiple of batch.ghost_size, "
            f"{batch.ghost_size}, or 'auto'"
        )
    return problems


def _noise_problems(config) -> list[str]:
    """No measurement of the noise that the run depends on."""
    if config.log.noise_every != 0 or not noise_scale.is_needed(config):
        return []
    needed_by = "batch.auto" if config.batch.auto else "schedule.scaling 'adascale'"
    return [f"log.noise_every: 0; allowed: an integer >= 1, or 'auto', with {needed_by}"]


def _trace_problems(config, num_updates: int) -> list[str]:
    """A trace that is bad, or ends before the run does."""
    batch = config.batch
    if batch.trace is None:
        return []
    try:
        trace = read_trace(batch)
    except BadSetting as problem:
        return [str(problem)]
    if batch.hold_last:
        return []
    if config.schedule.scaling == "adascale":
        return ["batch.hold_last: False; allowed: True with AdaScale, whose number of updates is not known"]
    if trace.length < num_updates:
        return [
            f"batch.trace: {trace.text}, ends with update {trace.length - 1:,}; allowed: up to the run's last, "
            f"{num_updates - 1:,}, or batch.hold_last"
        ]
    return []


def _local_start_problems(config, num_updates: int) -> list[str]:
    """Return a first local step that is not within the run."""
    sync = config.sync
    if sync.mode != "post_local" or 1 <= sync.start_step < num_updates:
        return []
    return [f"sync.start_step: {sync.start_step}; allowed: 1 to {num_updates - 1} with 'post_local'"]


def _sync_problems(config) -> list[str]:
    """What does not go with local steps, or with a synchronisation in every step."""
    sync, problems = config.sync, []
    if sync.mode != "post_local" and sync.start_step:
        problems.append(f"sync.start_step: {sync.start_step}; allowed: 0 with sync.mode {sync.mode!r}")
    if sync.mode == "every_step":
        only_value = {"every": 1, "outer_learning_rate": 1, "outer_momentum": 0}
        for name, value in only_value.items():
            if sync[name] != value:
                problems.append(f"sync.{name}: {sync[name]}; allowed: {value} with sync.mode 'every_step'")
        return problems
    name = config.optimizer.name
    if name in WITH_BASES and sync.optimizer_state == "average":
        problems.append(
            f"sync.optimizer_state: 'average'; allowed: keep | reset with {name}, whose bases have no mean"
        )
    if config.batch.auto:
        problems.append(f"batch.auto: True; allowed: False with sync.mode {sync.mode!r}, which measures no noise")
    return problems


def _model_problems(config, models: Models) -> list[str]:
    """Options that the network does not take."""
    model, taken = config.model, models[config.model.name].options
    return [
        f"model.{name}: {model[name]!r}; allowed: {unset!r} with model {model.name!r}"
        for name, unset in MODEL_OPTIONS.items()
        if model[name] != unset and name not in taken
    ]


def _view_problems(config) -> list[str]:
    """A mean over views where there is one."""
    if config.eval.view_average and config.augment.views == "none":
        return ["eval.view_average: True; allowed: False with augment.views 'none'"]
    return []


def _task_problems(config, models: Models) -> list[str]:
    """A network or fields that do not go with the task."""
    kind, train, problems = KINDS[config.task.name], config.train, []
    for_task = f"with task.name {kind.name!r}"
    if models[config.model.name].of_pixels != kind.of_pixels:
        names = [name for name, architecture in models.items() if architecture.of_pixels == kind.of_pixels]
        problems.append(f"model.name: {config.model.name!r}; allowed {for_task}: {' | '.join(names)}")
    for name, value in config.task.items():
        unset = MISSING_FIELDS.get(f"task.{name}", value)  # one of other code
        if name != "name" and name not in kind.fields and value != unset:
            problems.append(f"task.{name}: {value!r}; allowed {for_task}: {unset!r}")
    if train.target_accuracy is not None and (kind != CLASSIFICATION or train.target_score is not None):
        allowed = "train.target_score" if kind != CLASSIFICATION else "one of it and train.target_score"
        problems.append(f"train.target_accuracy: {train.target_accuracy}; allowed {for_task}: {allowed}")
    if kind.of_pixels:
        of_classes = {
            "train.label_smoothing": (train.label_smoothing, 0.0),
            "eval.shift_average": (config.eval.shift_average, 0),
        }
        problems += [
            f"{name}: {value}; allowed {for_task}: {unset}"
            for name, (value, unset) in of_classes.items()
            if value != unset
        ]
    return problems


def _init_problems(config) -> list[str]:
    """A checkpoint of no run."""
    if config.train.init_step is not None and config.train.init_from is None:
        return [f"train.init_step: {config.train.init_step}; allowed: with train.init_from"]
    return []

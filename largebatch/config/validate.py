"""Validation of a whole config, before a device is touched."""

import re

from ml_collections import config_dict

from largebatch.config.fields import flatten
from largebatch.config.rules import RULES, Networks, nearest, nearest_field, rules
from largebatch.errors import BadSetting, UserError
from largebatch.optim import schedules, traces
from largebatch.optim.batch_sizes import read_trace

# Beyond it a float32, as the training state counts them in, no longer grows by 1.
MOST_SCALE_INVARIANT_STEPS = 2**24


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

"""What a config says of the schedule."""

import dataclasses
import itertools

NAMES = ("constant", "linear", "cosine", "step")
WARMUPS = ("warmup_updates", "warmup_epochs", "warmup_examples")
DECAY_OVER = ("updates", "images")  # what the decay of linear and cosine counts


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """A config's `schedule`; configs/default.py explains the fields."""

    name: str
    scaling: str
    b2_scaling: str
    reference_batch_size: int
    warmup_updates: int | None
    warmup_epochs: float | None
    warmup_examples: int | None
    final_fraction: float
    decay_steps: tuple[int, ...]
    decay_factor: float
    decay_by: str
    decay_over: str

    @classmethod
    def from_config(cls, fields) -> "ScheduleOptions":
        """From a config's `schedule`, as a ConfigDict or a dict."""
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})


def problems(options: ScheduleOptions, num_updates: int) -> list[str]:
    """What is contradictory in the fields of a config's `schedule`, each of which is allowed by itself."""
    messages, name, steps = [], options.name, options.decay_steps
    given = [f"schedule.{field}" for field in WARMUPS if getattr(options, field) is not None]
    if len(given) > 1:
        messages.append(f"{' and '.join(given)}: both given; allowed: one of them")
    updates = options.warmup_updates
    if updates is not None and updates >= num_updates:
        messages.append(f"schedule.warmup_updates: {updates}; allowed: fewer than the run's {num_updates} updates")
    if name == "step" and not steps:
        messages.append(
            "schedule.decay_steps: (); allowed: with schedule.name 'step', the updates at which to decay"
        )
    if name != "step" and steps:
        messages.append(f"schedule.decay_steps: {steps}; allowed: () with schedule.name {name!r}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        messages.append(f"schedule.decay_steps: {steps}; allowed: ascending")
    elif steps and not 0 < steps[0] <= steps[-1] < num_updates:
        messages.append(f"schedule.decay_steps: {steps}; allowed: within the run's {num_updates} updates")
    elif steps and updates is not None and updates > steps[0]:
        messages.append(f"schedule.warmup_updates: {updates}; allowed: up to the first decay, at {steps[0]}")
    names = {"rate": NAMES, "batch": ("step",), "seesaw": ("linear", "cosine", "step")}[options.decay_by]
    if name not in names:
        messages.append(f"schedule.decay_by: {options.decay_by!r}; allowed: 'rate' with schedule.name {name!r}")
    if options.decay_by != "rate" and options.scaling == "adascale":
        messages.append(
            f"schedule.decay_by: {options.decay_by!r}; allowed: 'rate' with schedule.scaling 'adascale'"
        )
    decays_smoothly = name in ("linear", "cosine") and options.decay_by == "rate" and options.scaling != "adascale"
    if options.decay_over == "images" and not decays_smoothly:
        messages.append(
            "schedule.decay_over: 'images'; allowed: with name linear | cosine, decay_by rate and no adascale"
        )
    return messages

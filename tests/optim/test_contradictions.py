"""Settings of batches, schedules and synchronisation that contradict each other are refused before a run starts."""

import pytest
from conftest import facts_of, typed

from configs import default
from largebatch.hardware.chips import Hardware
from largebatch.util import UserError
from plan import plan_run

STEPS = {"schedule.name": "step", "schedule.decay_steps": (30,)}
HELD = {"batch.trace": (4,), "batch.hold_last": True}
LOCAL = {"sync.mode": "local"}
BATCH_NORM = {"model.norm": "batch"}
ADASCALE = {"schedule.scaling": "adascale", "optimizer.name": "sgd"}
CASES = [
    # Schedules, of 100 steps.
    ({"schedule.warmup_steps": 2, "schedule.warmup_epochs": 1.0}, "schedule.warmup_steps and .*: both given"),
    ({"schedule.warmup_steps": 100}, "warmup_steps: 100; allowed: fewer than the run's 100 steps"),
    ({"schedule.warmup_epochs": 10.0}, r"schedule.warmup_epochs: 10.0 is \d+ steps; allowed: up to 99"),
    ({"schedule.warmup_examples": 10**30}, "allowed: up to 99, before the last step"),
    (STEPS | {"schedule.warmup_steps": 31}, "allowed: up to the first decay, at 30"),
    (STEPS | {"schedule.warmup_epochs": 4.0}, r"is 40 steps; allowed: up to 30, before the first decay"),
    (STEPS | {"schedule.decay_steps": (60, 30)}, r"schedule.decay_steps: \(60, 30\); allowed: ascending"),
    (STEPS | {"schedule.decay_steps": (30, 100)}, "allowed: within the run's 100 steps"),
    ({"schedule.name": "step"}, r"schedule.decay_steps: \(\); allowed: with schedule.name 'step'"),
    (STEPS | {"schedule.name": "linear"}, r"decay_steps: \(30,\); allowed: \(\) with .*'linear'"),
    (
        {"schedule.name": "cosine", "schedule.decay_by": "batch"},
        "'batch'; allowed: 'rate' with .* 'cosine'",
    ),
    ({"schedule.decay_over": "images"}, "decay_over: 'images'; allowed: with name linear . cosine"),
    ({"schedule.decay_by": "seesaw"}, "decay_by: 'seesaw'; allowed: 'rate' with schedule.name 'constant'"),
    # Batches that change.
    ({"batch.trace": (4, 0, 4)}, "batch.trace: 0 at place 1; allowed: an integer from 1 to"),
    (HELD | {"batch.trace": (4, 641)}, "batch.trace: 641 at place 1; allowed: an integer from 1 to 640"),
    ({"batch.trace": ()}, r"batch.trace: \(\); allowed: at least one batch size"),
    ({"batch.trace": (4, 4)}, "batch.trace: 2 given, ends with step 1; allowed: up to the run's last, 99, or"),
    ({"batch.trace": "nowhere.csv"}, "batch.trace: nowhere.csv cannot be read"),
    ({"batch.trace": 4}, "batch.trace: 4; allowed: a tuple of integers >= 1, the path of a CSV file, or None"),
    (HELD | {"batch.auto": True}, "batch.trace and batch.auto: both given"),
    (HELD | {"batch.per_device_batch_size": 4}, "per_device_batch_size: 4; allowed: None with a list"),
    (HELD | STEPS | {"schedule.decay_by": "batch"}, r"decay_by: 'batch'; allowed: 'rate' with batch\.trace"),
    ({"batch.trace": (4,) * 100} | ADASCALE, r"batch\.hold_last: False; allowed: True with AdaScale"),
    ({"batch.hold_last": True}, "batch.hold_last: True; allowed: with batch.trace"),
    ({"batch.max_size": 64}, "batch.max_size: 64; allowed: with batch.auto"),
    ({"batch.auto": True, "batch.size": 16, "batch.max_size": 8}, "max_size: 8; allowed: at least batch.size, 16"),
    (
        {"batch.auto": True, "batch.per_device_batch_size": 4},
        "batch_size: 4; allowed: None with batch.auto",
    ),
    (
        {"batch.auto": True, "schedule.name": "linear", "schedule.decay_over": "images"},
        "decay_over: 'images'; allowed: 'steps' where training finds",
    ),
    # Groups that batch normalisation or the gradient's noise would take, on 8 devices.
    (
        BATCH_NORM | {"batch.size": 24, "batch.micro_batch_size": 2},
        "batches of 24 in ghost batches of up to 2",
    ),
    (
        BATCH_NORM | {"batch.size": 15},
        "'batch' with batches of 15 .*; allowed: at least 2 images in each",
    ),
    (BATCH_NORM | {"batch.micro_batch_size": 48, "batch.ghost_size": 32}, "a multiple of .*, 32, or 'auto'$"),
    (
        {"batch.ghost_size": 32, "model.norm": "group"},
        "ghost_size: 32; allowed: None with model.norm 'group'",
    ),
    (
        {"batch.auto": True, "batch.size": 1},
        "from 1 on; allowed: at least 2 images, since noise is",
    ),
    ({"batch.auto": True, "log.noise_every": 0}, "allowed: an integer >= 1, or 'auto', with batch.auto"),
    # Devices that take local steps.
    ({"sync.mode": "post_local"}, "sync.start_step: 0; allowed: 1 to 99 with 'post_local'"),
    ({"sync.mode": "post_local", "sync.start_step": 100}, "sync.start_step: 100; allowed: 1 to 99"),
    (LOCAL | {"sync.start_step": 2}, "sync.start_step: 2; allowed: 0 with sync.mode 'local'"),
    ({"sync.every": 4}, "sync.every: 4; allowed: 1 with sync.mode 'every_step'"),
    ({"sync.outer_momentum": 0.9}, "sync.outer_momentum: 0.9; allowed: 0.0 with sync.mode 'every_step'"),
    (LOCAL | {"optimizer.name": "soap"}, "keep . reset with soap"),
    (LOCAL | ADASCALE, "'adascale'; allowed: none . linear . sqrt with sync.mode 'local'"),
    (LOCAL | {"batch.auto": True}, "batch.auto: True; allowed"),
    (ADASCALE | {"optimizer.name": "soap"}, "'adascale'; allowed: none . linear . sqrt with soap, for its gain is"),
    (
        {"sync.mode": "post_local", "sync.start_step": 90, "sync.every": 2}
        | {"schedule.decay_by": "batch", "schedule.decay_factor": 0.5}
        | STEPS,
        r"sync\.start_step: 90; allowed: up to 64",  # the batch grows, so there are fewer steps
    ),
]


@pytest.mark.parametrize(("fields", "message"), CASES)
def test_contradictions_are_refused(fields, message):
    config = default.get_config()
    config.batch.size, config.train.inner_steps, config.train.outer_steps = 64, 10, 10
    with config.ignore_type():
        config.update_from_flattened_dict(fields)
    with pytest.raises(UserError, match=message):
        plan_run(typed(config), facts_of(80, (16, 16, 3), num_classes=10), Hardware("cpu", "cpu", 8))

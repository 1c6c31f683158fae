r"""A fixed batch beside batches that grow: Seesaw, and the sizes that branches of a run were measured to bear.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/batch_schedules.py \
        --study runs/studies/batch_schedules --seeds 3 --config.dataset.image_size 32

All see 345,600 images (with the trace 345,088). configs/eurosat_batch_warmup.csv is what `sweep.py --branch` wrote
for Muon at 32 pixels; docs/batches.md has the commands.
"""

from optuna.distributions import CategoricalDistribution

CHANGES = {"batch.size": 512, "batch.trace": "configs/eurosat_batch_warmup.csv", "schedule.decay_by": "seesaw"}
IMAGES, TRACE_UPDATES = 345_600, 946


def get_space():
    return {
        "batch.size": CategoricalDistribution([128, CHANGES["batch.size"]]),
        "batch.trace": CategoricalDistribution([None, CHANGES["batch.trace"]]),
        "schedule.decay_by": CategoricalDistribution(["rate", CHANGES["schedule.decay_by"]]),
    }


def includes(values):
    changed = [field for field, value in CHANGES.items() if values[field] == value]
    return len(changed) <= 1


def derive(config):
    config.schedule.scaling, config.schedule.b2_scaling = "sqrt", "half_life"
    config.schedule.reference_batch_size = 128
    config.schedule.decay_factor = 0.7
    config.train.inner_steps, config.train.outer_steps = IMAGES // config.batch.size // 5, 5
    if config.batch.trace is not None:
        config.batch.hold_last, config.schedule.decay_over = True, "images"
        config.train.inner_steps, config.train.outer_steps = TRACE_UPDATES // 2, 2

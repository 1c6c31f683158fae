r"""A fixed batch beside batches that grow: Seesaw, and the sizes that branches of a run were measured to bear.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/batch_schedules.py \
        --study runs/studies/batch_schedules --seeds 3 --config.dataset.image_size 32

All see 345,600 images (with the trace 345,088). configs/eurosat_batch_warmup.csv is what `sweep.py --branch` wrote
for Muon at 32 pixels; docs/batches.md has the commands.
"""

CHOICES = {
    "batch.size": [128, 512],
    "batch.trace": [None, "configs/eurosat_batch_warmup.csv"],
    "schedule.decay_by": ["rate", "seesaw"],
}
IMAGES, TRACE_STEPS = 345_600, 946


def suggest(trial):
    changed = False
    for field, choices in CHOICES.items():
        value = trial.suggest_categorical(field, choices[:1] if changed else choices)
        changed = changed or value != choices[0]


def derive(config):
    config.schedule.scaling, config.schedule.b2_scaling = "sqrt", "half_life"
    config.schedule.reference_batch_size = 128
    config.schedule.decay_factor = 0.7
    config.train.inner_steps, config.train.outer_steps = IMAGES // config.batch.size // 5, 5
    if config.batch.trace is not None:
        config.batch.hold_last, config.schedule.decay_over = True, "images"
        config.train.inner_steps, config.train.outer_steps = TRACE_STEPS // 2, 2

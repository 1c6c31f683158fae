r"""SGD of a batch of 128 beside 2,048 at a rate scaled linearly and by AdaScale, for 20 passes' worth of progress.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/adascale.py \
        --study runs/studies/adascale --seeds 3 --config.dataset.image_size 32

Linear scaling has a sixteenth of the steps. AdaScale goes on until it has made 3,375 scale-invariant steps.
"""

SMALL, LARGE, STEPS = 128, 2048, 3375


def suggest(trial):
    scaling = trial.suggest_categorical("schedule.scaling", ["none", "linear", "adascale"])
    trial.suggest_categorical("batch.size", [SMALL if scaling == "none" else LARGE])


def derive(config):
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.1
    config.optimizer.nesterov = False
    config.schedule.reference_batch_size, config.schedule.warmup_steps = SMALL, 340
    config.train.inner_steps, config.train.outer_steps = 135, STEPS // 135
    if config.schedule.scaling == "linear":
        config.schedule.warmup_steps, config.train.inner_steps, config.train.outer_steps = 21, 211, 1
    if config.schedule.scaling == "adascale":
        config.train.inner_steps, config.train.outer_steps = 75, STEPS // 75

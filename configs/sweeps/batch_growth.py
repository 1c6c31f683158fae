r"""A rate that is cut to a fifth twice beside a batch that grows fivefold instead: Smith et al. 2018.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/batch_growth.py \
        --study runs/studies/batch_growth --seeds 3 --config.dataset.image_size 32
"""


def suggest(trial):
    trial.suggest_categorical("schedule.decay_by", ["rate", "batch"])


def derive(config):
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.1
    config.schedule.name, config.schedule.warmup_steps = "step", 67
    config.schedule.decay_steps, config.schedule.decay_factor = (1350, 2025), 0.2
    config.train.inner_steps, config.train.outer_steps = 135, 20

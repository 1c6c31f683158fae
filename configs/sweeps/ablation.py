"""What each ingredient of eurosat_fast.py is worth: the recipe with one thing changed at a time.

    python sweep.py --config configs/eurosat_fast.py --space configs/sweeps/ablation.py \
        --study runs/studies/ablation --seeds 3

The first value of each field is the recipe's own.
"""

from optuna.distributions import CategoricalDistribution

CHOICES = {
    "optimizer.name": ["muon", "nadamw", "lamb", "sgd"],
    "model.name": ["resconvnet", "convnet"],
    "model.norm": ["batch", "group", "none"],
    "model.stem": ["conv", "whitened"],
    "model.zero_head": [False, True],
    "schedule.name": ["linear", "cosine", "constant"],
    "schedule.warmup_updates": [67, 1],
    "optimizer.nesterov": [True, False],
    "optimizer.bias_multiplier": [1.0, 8.0],
    "optimizer.weight_decay": [0.0, 0.05],
    "train.label_smoothing": [0.0, 0.1],
    "batch.size": [128, 512],
}
# Tuned for each under the same budget: configs/sweeps/all_optimizers.py.
RATES = {"nadamw": 3e-3, "lamb": 1e-2, "sgd": 0.1}


def get_space():
    return {field: CategoricalDistribution(choices) for field, choices in CHOICES.items()}


def includes(values):
    return sum(values[field] != choices[0] for field, choices in CHOICES.items()) <= 1


def derive(config):
    config.optimizer.learning_rate = RATES.get(config.optimizer.name, config.optimizer.learning_rate)
    if config.batch.size != 128:  # as many images in fewer updates
        factor = config.batch.size // 128
        config.train.inner_steps = -(-config.train.inner_steps // factor)
        config.schedule.warmup_updates = -(-config.schedule.warmup_updates // factor)

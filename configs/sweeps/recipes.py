r"""A search around a recipe: rate, momentum and weight decay of the config's own optimizer.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/recipes.py --study runs/studies/recipes \
        --sampler tpe --pruner median --trials 30
"""

from optuna.distributions import FloatDistribution


def get_space():
    return {
        "optimizer.learning_rate": FloatDistribution(1e-3, 0.1, log=True),
        "optimizer.momentum": FloatDistribution(0.8, 0.98),
        "optimizer.weight_decay": FloatDistribution(1e-4, 1.0, log=True),
    }

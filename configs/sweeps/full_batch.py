"""Rates of LAMB, Adam and SGD for eurosat_full_batch.py, on small images and a smaller batch, 80 s each.

    python sweep.py --config configs/eurosat_full_batch.py --space configs/sweeps/full_batch.py \\
        --study runs/studies/full_batch --config.dataset.image_size 32 --config.batch.size 4096
"""

from optuna.distributions import CategoricalDistribution

RATES = {
    "lamb": (0.01, 0.03, 0.1, 0.3),
    "adam": (0.001, 0.003, 0.01, 0.03),
    "sgd": (0.01, 0.03, 0.1, 0.3),
}


def get_space():
    rates = sorted({rate for rates in RATES.values() for rate in rates})
    return {
        "optimizer.name": CategoricalDistribution(list(RATES)),
        "optimizer.learning_rate": CategoricalDistribution(rates),
    }


def includes(values):
    return values["optimizer.learning_rate"] in RATES[values["optimizer.name"]]


def derive(config):
    config.optimizer.momentum, config.optimizer.b2 = 0.9, 0.999

"""The seed's comparison: LAMB, Adam and SGD, each at eight learning rates.

python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies/optimizers
"""

from optuna.distributions import CategoricalDistribution


def get_space():
    return {
        "optimizer.name": CategoricalDistribution(["lamb", "adam", "sgd"]),
        # Two to a decade. One range for all three: SGD's best lies at its upper end, Adam's at its lower.
        "optimizer.learning_rate": CategoricalDistribution([3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]),
    }

"""How large can the batch be before it stops paying? Updates to a target accuracy, rates tuned per batch size.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/critical_batch.py \
        --study runs/studies/critical_batch --best_seeds 3 --config.train.target_accuracy 0.8

Then `python report.py runs/studies/critical_batch` draws the curve and fits its knee.
"""

from optuna.distributions import CategoricalDistribution

MAX_EXAMPLES = 1_500_000  # of a run that does not reach the target


def get_space():
    return {
        "batch.size": CategoricalDistribution([64, 256, 1024, 2048, 4096, 8192, 16384]),
        "optimizer.name": CategoricalDistribution(["lamb", "adam"]),
        "optimizer.learning_rate": CategoricalDistribution([1e-3, 3e-3, 1e-2, 3e-2]),
    }


def derive(config):
    """Validates about as often, in updates, as the target is some percent away."""
    config.train.inner_steps = max(4, round(12_800 / config.batch.size))
    config.train.outer_steps = max(1, MAX_EXAMPLES // (config.batch.size * config.train.inner_steps))

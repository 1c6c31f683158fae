"""How large can the batch be before it stops paying? Updates to a target accuracy, rates tuned per batch size.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/critical_batch.py \
        --study runs/studies/critical_batch --best_seeds 3 \
        --config.train.target_accuracy 0.75 --config.dataset.image_size 32

Then `python report.py runs/studies/critical_batch` draws the curve and fits its knee.
"""

from optuna.distributions import CategoricalDistribution


def get_space():
    return {
        "batch.size": CategoricalDistribution([64, 256, 512, 1024, 2048, 4096]),
        "optimizer.name": CategoricalDistribution(["lamb", "adam"]),
        "optimizer.learning_rate": CategoricalDistribution([1e-3, 3e-3, 1e-2, 3e-2]),
    }


def derive(config):
    """Validates every few percent of the way to the target, and gives up after some times that way."""
    size = config.batch.size
    inner = max(2, 6400 // size)
    config.train.inner_steps = inner
    config.train.outer_steps = max((150_000 + 60 * size) // (size * inner), 130 // inner)

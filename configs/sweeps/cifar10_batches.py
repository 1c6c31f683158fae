"""Updates of SGD to a target over batch size: ResNet-8 on CIFAR-10, three rates for each batch.

    python sweep.py --config configs/cifar10_resnet8.py --space configs/sweeps/cifar10_batches.py \
        --study runs/studies/cifar10 --config.dataset.path CIFAR-10.zip --config.train.target_accuracy 0.6

Then `python report.py runs/studies/cifar10` draws the curve. Each run sees at most 300,000 images.
"""

from optuna.distributions import CategoricalDistribution

MOST_IMAGES = 300_000
RATES = {64: (0.0125, 0.025, 0.05), 512: (0.05, 0.1, 0.2), 4096: (0.1, 0.2, 0.4)}
VALIDATIONS = 24


def get_space():
    rates = sorted({rate for rates in RATES.values() for rate in rates})
    return {
        "batch.size": CategoricalDistribution(list(RATES)),
        "optimizer.learning_rate": CategoricalDistribution(rates),
    }


def includes(values):
    return values["optimizer.learning_rate"] in RATES[values["batch.size"]]


def derive(config):
    """A constant rate after a warm-up, and a validation every few percent of the way."""
    num_updates = MOST_IMAGES // config.batch.size
    config.train.inner_steps = max(2, num_updates // VALIDATIONS)
    config.train.outer_steps = num_updates // config.train.inner_steps
    config.schedule.name = "constant"
    config.schedule.warmup_updates = max(1, num_updates // 10)

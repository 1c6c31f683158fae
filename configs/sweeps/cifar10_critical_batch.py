r"""Steps of SGD and Muon to 0.70 on CIFAR-10 over batch size: rates first, then shorter runs, then seeds.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/cifar10_critical_batch.py \
        --study runs/studies/cifar10_critical_batch --pruner median --best_seeds 3 \
        --config.train.target_accuracy 0.7 --config.dataset.name cifar10 \
        --config.dataset.path CIFAR-10-jpeg.zip --config.augment.views flip

As critical_batch.py, at three batch sizes. Views are an image and its mirror image, since objects have an upside.
"""

from configs.sweeps.critical_batch import GROUPS, derive, refine, suggest_among

__all__ = ["GROUPS", "derive", "refine", "suggest"]


def suggest(trial):
    suggest_among(trial, ["sgd", "muon"], [128, 512, 2048])

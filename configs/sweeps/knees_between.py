r"""knees.py at 256 and 1,024, for the optimizers that do not reach the target with batches of 2,048 and more.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/knees_between.py \
        --study runs/studies/knees_between --pruner median --best_seeds 3 --config.train.target_accuracy 0.9 \
        --config.dataset.image_size 32
"""

from configs.sweeps.knees import GROUPS, derive, refine, suggest_among

__all__ = ["GROUPS", "derive", "refine", "suggest"]


def suggest(trial):
    suggest_among(trial, ["sgd", "lamb"], [256, 1024])

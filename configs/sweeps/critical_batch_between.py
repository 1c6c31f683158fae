r"""critical_batch.py at 256 and 1,024, for the optimizers that do not reach the target with 2,048 and more.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/critical_batch_between.py \
        --study runs/studies/critical_batch_between --pruner median --best_seeds 3 \
        --config.train.target_accuracy 0.9 --config.dataset.image_size 32
"""

from configs.sweeps.critical_batch import GROUPS, derive, refine, suggest_among

__all__ = ["GROUPS", "derive", "refine", "suggest"]


def suggest(trial):
    suggest_among(trial, ["sgd", "lamb"], [256, 1024])

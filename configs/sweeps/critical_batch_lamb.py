r"""critical_batch.py for LAMB alone, to 0.85: with batches of 2,048 and more it misses 0.90 within so many images.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/critical_batch_lamb.py \
        --study runs/studies/critical_batch_lamb --pruner median --best_seeds 3 \
        --config.train.target_accuracy 0.85 --config.dataset.image_size 32
"""

from configs.sweeps.critical_batch import GROUPS, derive, refine, suggest_among

__all__ = ["GROUPS", "derive", "refine", "suggest"]


def suggest(trial):
    suggest_among(trial, ["lamb"], [128, 512, 2048, 8192])

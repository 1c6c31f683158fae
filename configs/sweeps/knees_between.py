r"""knees.py at 256 and 1,024, for the optimizers that do not reach the target with batches of 2,048 and more.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/knees_between.py \
        --study runs/studies/knees_between --pruner median --best_seeds 3 --config.train.target_accuracy 0.9 \
        --config.dataset.image_size 32
"""

from configs.sweeps.knees import GROUPS, derive, includes, refine, space_of

__all__ = ["GROUPS", "derive", "get_space", "includes", "refine"]


def get_space():
    return space_of(["sgd", "lamb"], [256, 1024])

r"""Every loss of masks beside l1 for depths, and every loss of depths beside cross-entropy for masks.

    python sweep.py --config configs/scenes_tiny.py --space configs/sweeps/scenes_losses.py \
        --study runs/studies/scenes_losses --config.train.outer_steps 3 --seeds 3
"""

from optuna.distributions import CategoricalDistribution


def get_space():
    return {
        "task.mask_loss": CategoricalDistribution(["cross_entropy", "dice", "cross_entropy_dice", "focal"]),
        "task.depth_loss": CategoricalDistribution(["l1", "berhu", "gradient"]),
    }


def includes(values):
    return values["task.mask_loss"] == "cross_entropy" or values["task.depth_loss"] == "l1"

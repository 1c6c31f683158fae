r"""Every loss of masks beside l1 for depths, and every loss of depths beside cross-entropy for masks.

    python sweep.py --config configs/scenes_tiny.py --space configs/sweeps/scenes_losses.py \
        --study runs/studies/scenes_losses --config.train.outer_steps 3 --seeds 3
"""


def suggest(trial):
    mask_loss = trial.suggest_categorical(
        "task.mask_loss", ["cross_entropy", "dice", "cross_entropy_dice", "focal"]
    )
    trial.suggest_categorical(
        "task.depth_loss", ["l1", "berhu", "gradient"] if mask_loss == "cross_entropy" else ["l1"]
    )

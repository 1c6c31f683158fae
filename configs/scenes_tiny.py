"""Mask and depth of small scenes, which are made from seeds: no download.

    python train.py --config configs/scenes_tiny.py --workdir runs/scenes

Expected: a mean IoU of 0.941 to 0.944 and a depth RMSE of 0.055 to 0.056 of validation (3 seeds);
4,000 steps, 7 minutes on 2 cores.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.dataset.name = "scenes"
    c.dataset.image_size = 48
    c.dataset.num_examples = 30_000
    c.augment.views = "flip"
    c.task.name = "mask_depth"
    c.task.depth_weight = 10.0
    c.model.name = "resunet_tiny"
    c.model.dtype = "auto"
    c.model.norm = "batch"
    c.batch.size = 64
    c.batch.ghost_size = 32
    c.optimizer.name = "muon"
    c.optimizer.learning_rate = 0.05
    c.optimizer.nesterov = True
    c.optimizer.adamw_multiplier = 0.1
    c.schedule.name = "linear"
    c.schedule.warmup_steps = 50
    c.train.inner_steps = 200
    c.train.outer_steps = 20
    return c

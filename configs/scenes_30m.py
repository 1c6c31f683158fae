"""Mask and depth of 1.2 million scenes of 96 pixels by a network of 30 million parameters, for a TPU v3-8.

    python train.py --config configs/scenes_30m.py --workdir runs/scenes_30m

An outer loop is a pass over the training scenes, half of them mirrored. The scenes are made once, in 3 ms of a core
each, or an hour in all.

Expected: not run on a TPU.
"""

from configs import scenes_tiny


def get_config():
    c = scenes_tiny.get_config()
    c.dataset.image_size = 96
    c.dataset.num_examples = 1_200_000
    c.augment.views = "flip"
    c.model.name = "resunet"
    c.batch.size = 2048
    c.batch.ghost_size = c.batch.micro_batch_size = 128  # 256 at once do not fit on a core
    c.optimizer.name = "lamb"
    c.optimizer.learning_rate = 0.01
    c.optimizer.adamw_multiplier = 1.0
    c.optimizer.nesterov = False
    c.schedule.warmup_steps = 469
    c.train.inner_steps = 469  # 960,000 training scenes
    c.train.outer_steps = 15
    return c

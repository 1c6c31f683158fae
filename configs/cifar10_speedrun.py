"""CIFAR-10 on one card as fast as it goes: airbench's network, Muon, 200 steps of 2,000 images in one call.

    python train.py --config configs/cifar10_speedrun.py --config.dataset.path CIFAR-10.zip --workdir runs/speedrun

The settings are those of airbench94_muon (Jordan 2024), which reaches 0.94 in 8 passes over 50,000 images: as many
steps here, of 45,000 images, since 5,000 are kept for validation. Other than there, kernels are not scaled back
after each step, the head, biases and norms are AdamW's with the multipliers of cifar10_fast.py, every rate falls
until the last step, and nothing decays.

Expected: not measured. A batch is one micro-batch and one batch of the normalisation: 2,000 images need a card.
"""

from configs import cifar10_fast


def get_config():
    c = cifar10_fast.get_config()
    c.model.name = "airbench"
    c.batch.size = 2_000
    c.batch.micro_batch_size = 2_000
    c.batch.ghost_size = None
    c.optimizer.learning_rate = 0.24
    c.optimizer.momentum = 0.6
    c.schedule.warmup_steps = 1  # none
    c.train.inner_steps = 200
    c.train.outer_steps = 1
    return c

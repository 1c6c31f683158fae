"""CIFAR-10 as published, ResNet-8 and SGD: the standard work for steps to a target over batch size.

    python train.py --config configs/cifar10_resnet8.py --config.dataset.path CIFAR-10.zip --workdir runs/cifar10

The zip or folder holds train/CLASS/*.jpg (or png) and test/CLASS/*. Validation images are cut from train. A TFDS
set does as well: prepare cifar10 and leave dataset.path off. Shallue et al. 2019, "Measuring the Effects of Data
Parallelism on Neural Network Training", train the same network. Vertical flips and transposes are off: objects have
an upside.

Expected: not measured with these settings. With constant rates validation accuracy is 0.60 after 1,560 steps of
64 (rate 0.05) or 552 of 512 (rate 0.2); one seed, JPEG copies (LOG.md).
"""

from configs import default


def get_config():
    c = default.get_config()
    c.dataset.name = "cifar10"
    c.augment.views = "flip"
    c.augment.shift = 4
    c.model.name = "resnet8"
    c.batch.size = 512
    c.optimizer.name = "sgd"
    c.optimizer.learning_rate = 0.1
    c.optimizer.nesterov = True
    c.optimizer.weight_decay = 5e-4
    c.schedule.name = "linear"
    c.schedule.warmup_steps = 44
    c.train.inner_steps = 88  # a pass over 45,000 images
    c.train.outer_steps = 10
    return c

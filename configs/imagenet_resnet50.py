"""ResNet-50 on ImageNet with batches of 8,192, all training images in the memory of a TPU v3-32.

    python train.py --config configs/imagenet_resnet50.py --workdir runs/imagenet

on each of the 4 hosts, after TFDS has prepared imagenet2012 as array_record; or give --config.dataset.path, a
folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG. The settings are those of Goyal et al. 2017, "Accurate, Large
Minibatch SGD: Training ImageNet in 1 Hour": rate 0.1 for 256 images, scaled linearly and reached in 5 epochs,
divided by 10 after 30, 60 and 80 of 90 epochs, and scales of the last normalisation of a block that start at zero
(in the network). Other than there, images are cut and resized to 224 pixels when they are decoded, and crops are
taken from that. And 50,000 of the training images are kept for test, since the labels of ImageNet's test images are
not published; the numbers of steps stay the paper's.

Not run here. Expected: less than the paper's 0.763, which is of other crops, from images of full size, and of a
training set 4% larger. A device holds 6.3 GB of images.
"""

from configs import default

STEPS_PER_EPOCH = 156.4  # 1,281,167 / 8,192, as in the paper


def get_config():
    c = default.get_config()
    c.dataset.name = "imagenet2012"
    c.dataset.image_size = 224
    c.dataset.resize = "crop"
    c.dataset.channels = 3
    c.augment.storage = "on_device"
    c.augment.views = "flip"
    c.augment.crop_scale = 0.08
    c.model.name = "resnet50"
    c.model.dtype = "auto"
    c.model.norm = "batch"
    c.batch.size = 8192
    # A device has up to 257 images of a batch: 4 times 64, and one more.
    c.batch.ghost_size = 65
    c.optimizer.name = "sgd"
    c.optimizer.learning_rate = 0.1
    c.optimizer.momentum = 0.9
    c.optimizer.nesterov = True
    c.optimizer.weight_decay = 1e-4
    c.schedule.name = "step"
    c.schedule.scaling = "linear"
    c.schedule.reference_batch_size = 256
    c.schedule.warmup_steps = round(5 * STEPS_PER_EPOCH)
    c.schedule.decay_steps = tuple(round(epoch * STEPS_PER_EPOCH) for epoch in (30, 60, 80))
    c.train.inner_steps = 782  # 5 epochs
    c.train.outer_steps = 18
    return c

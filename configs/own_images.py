"""Your own images, one folder per class: photographs of any size, which are kept upright.

    python train.py --config configs/own_images.py --config.dataset.path FOLDER --workdir runs/own_images

The network and optimizer of eurosat_muon.py. 20 passes over the training images, each image as it is or mirrored,
and a validation after every pass. Longer: --config.train.outer_steps 60. All 8 views, for images that have no
upside, as those of satellites and microscopes: --config.augment.views all.

Expected: validation accuracy 0.915 with 200 tiles of each class of EuroSAT, 0.720 with 500 photographs of each
class of CIFAR-10 (one seed each, LOG.md).
"""

from configs import eurosat_muon


def get_config():
    c = eurosat_muon.get_config()
    c.dataset.name = "own_images"
    c.dataset.image_size = 64
    c.augment.views = "flip"
    c.augment.shift = 4
    c.schedule.warmup_steps = None
    c.schedule.warmup_epochs = 0.5  # one pass; an epoch has both views of every image
    c.train.inner_steps = "pass"
    c.train.outer_steps = 20
    return c

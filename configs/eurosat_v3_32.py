r"""The settings of eurosat_seed.py on a TPU v3-32: 4 hosts x 8 devices, 5,400 of the 172,800 views on each.

    python train.py --config configs/eurosat_v3_32.py --config.dataset.path EuroSAT.zip --workdir runs/v3_32

on each of the 4 hosts. To try it on one machine (2 CPU cores: 35 to 50 s a step at 32 pixels):

    python -m largebatch.pod --hosts 4 --devices 8 -- python train.py --config configs/eurosat_v3_32.py \
        --config.dataset.path EuroSAT.zip --config.dataset.image_size 32 --config.train.inner_steps 1 \
        --config.train.outer_steps 2

Expected as in eurosat_seed.py. Not run on a TPU yet.
"""

from configs import eurosat_seed


def get_config():
    c = eurosat_seed.get_config()
    c.model.dtype = "auto"
    return c

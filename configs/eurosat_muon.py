"""Muon, small batches and a residual network with ghost batch normalisation: what most studies vary.

    python train.py --config configs/eurosat_muon.py --config.dataset.path EuroSAT.zip --workdir runs/eurosat_muon

4 passes over the 21,600 images, another view of each in every pass. docs/results.md has the studies.
eurosat_fast.py needs fewer images.

Expected: about 2 minutes of training on 2 CPU cores, validation accuracy about 0.954 after 86,400 images.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.dataset.name = "eurosat"
    c.model.name = "resconvnet"
    c.model.dtype = "auto"
    c.model.norm = "batch"
    c.model.norm_decay = 0.95
    c.batch.size = 128
    c.batch.ghost_size = 32
    c.optimizer.name = "muon"
    c.optimizer.learning_rate = 0.05
    c.optimizer.momentum = 0.9
    c.optimizer.nesterov = True
    c.optimizer.adamw_multiplier = 0.2
    c.schedule.name = "linear"
    c.schedule.warmup_steps = 67
    c.train.inner_steps = 135
    c.train.outer_steps = 5
    return c

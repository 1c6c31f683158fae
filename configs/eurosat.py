"""The real job, at a mini-batch that suits a CPU: EuroSAT, LAMB, batch 1,024 of the 172,800 views.

python train.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip --workdir runs/eurosat
"""

from configs import default


def get_config():
    c = default.get_config()
    c.dataset.name = "eurosat"
    c.batch.size = 1024
    c.optimizer.name = "lamb"
    c.optimizer.learning_rate = 0.01
    c.train.inner_steps = 20
    c.train.outer_steps = 15
    return c

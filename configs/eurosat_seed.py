"""The seed's own settings: LAMB at a constant rate on all 172,800 views, 13 times 100 updates.

    python train.py --config configs/eurosat_seed.py --config.dataset.path EuroSAT.zip --workdir runs/eurosat_seed

Expected, from the seed's page: under 20 s on a TPU v3-32, 0.95 validation accuracy after the 13th hundred updates;
it gives no learning rate. It needs an accelerator: 2 CPU cores would take 30 hours. Trust ratios are on biases too,
as optax.lamb has them.
"""

from configs import default


def get_config():
    c = default.get_config()
    c.dataset.name = "eurosat"
    c.batch.size = "full"
    c.optimizer.name = "lamb"
    c.optimizer.learning_rate = 0.01
    c.optimizer.exclude_biases = False
    c.train.inner_steps = 100
    c.train.outer_steps = 13
    return c

r"""How many steps does each optimizer need to a target, at each batch size? Rates first, then shorter runs.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/critical_batch.py \
        --study runs/studies/critical_batch --pruner median --best_seeds 3 \
        --config.train.target_accuracy 0.9 --config.dataset.image_size 32

Each optimizer is tuned at each batch size: four rates with a linear decay over up to 400,000 images (1,000,000 for
the two largest batches), then half and a quarter of the images at the best rate, then three seeds of the best. (The
decay makes the last part of a run the best one: a run that is too long reaches the target late.) About 5 hours on
2 CPU cores.
"""

GROUPS = ("optimizer.name", "batch.size")
LARGE = 8192
RATES = {  # of batches of 128, of 512 and 2,048, and of larger ones
    "sgd": ([0.05, 0.1, 0.2, 0.4], [0.1, 0.2, 0.4, 0.8], [0.2, 0.4, 0.8, 1.6]),
    "lamb": ([0.005, 0.01, 0.02, 0.04], [0.01, 0.02, 0.04, 0.08], [0.01, 0.02, 0.04, 0.08]),
    "muon": ([0.03, 0.06, 0.12, 0.24], [0.06, 0.12, 0.24, 0.48], [0.06, 0.12, 0.24, 0.48]),
    "soap_muon": ([0.03, 0.06, 0.12, 0.24], [0.06, 0.12, 0.24, 0.48], [0.06, 0.12, 0.24, 0.48]),
}
ADAMW_RATE = 0.01  # as in eurosat_muon.py
PARTS = [40, 20, 10]  # of the longest run, in fortieths of it


def rates(optimizer, batch_size):
    small, middle, large = RATES[optimizer]
    if batch_size < 512:
        return small
    return middle if batch_size < LARGE else large


def suggest(trial):
    suggest_among(trial, list(RATES), [128, 512, 2048, 8192, 21_600])


def suggest_among(trial, optimizers, batch_sizes):
    optimizer = trial.suggest_categorical("optimizer.name", optimizers)
    batch_size = trial.suggest_categorical("batch.size", batch_sizes)
    trial.suggest_categorical("optimizer.learning_rate", rates(optimizer, batch_size))
    trial.suggest_categorical("train.outer_steps", PARTS[:1])


def refine(best):
    return [{**best, "train.outer_steps": parts} for parts in PARTS[1:]]


def derive(config):
    size = config.batch.size
    images = 1_000_000 if size >= LARGE else 400_000
    config.train.inner_steps = max(images // PARTS[0] // size, 1)
    config.schedule.warmup_steps = max(config.train.inner_steps * config.train.outer_steps // 10, 1)
    if config.optimizer.name == "soap_muon":  # new bases about every 1,280 images
        config.optimizer.b2 = 0.95
        config.optimizer.soap_every = max(1280 // size, 1)
    # The rate that head, biases and norms have, whatever that of the kernels.
    config.optimizer.adamw_multiplier = ADAMW_RATE / config.optimizer.learning_rate
    config.model.norm_decay = 0.95 ** min(size / 128, 8)  # the statistics of larger batches are better

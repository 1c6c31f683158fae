r"""Every optimizer at six learning rates, two to a decade, with all else as in the config, on small images.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/all_optimizers.py \
        --study runs/studies/all_optimizers --config.dataset.image_size 32

Each has a window of its own: the best rate of SGD is many times that of Adam. tuned_optimizers.py goes on.
"""

RATES = {
    "lamb": [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3],
    "adam": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1],
    "sgd": [3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0],
    "nadamw": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1],
    "lars": [0.1, 0.3, 1.0, 3.0, 10.0, 30.0],
    "muon": [1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0],
    "soap": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1],
}


def suggest(trial):
    optimizer = trial.suggest_categorical("optimizer.name", list(RATES))
    trial.suggest_categorical("optimizer.learning_rate", RATES[optimizer])

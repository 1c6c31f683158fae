"""The seed's comparison: LAMB, Adam and SGD, each at eight learning rates.

python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies/optimizers
"""


def suggest(trial):
    trial.suggest_categorical("optimizer.name", ["lamb", "adam", "sgd"])
    # Two to a decade. One range for all three: SGD's best lies at its upper end, Adam's at its lower.
    trial.suggest_categorical("optimizer.learning_rate", [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0])

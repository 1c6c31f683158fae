r"""A search around a recipe: rate, momentum and weight decay of the config's own optimizer.

    python sweep.py --config configs/eurosat.py --space configs/sweeps/recipes.py --study runs/studies/recipes \
        --sampler tpe --pruner median --trials 30
"""


def suggest(trial):
    trial.suggest_float("optimizer.learning_rate", 1e-3, 0.1, log=True)
    trial.suggest_float("optimizer.momentum", 0.8, 0.98)
    trial.suggest_float("optimizer.weight_decay", 1e-4, 1.0, log=True)

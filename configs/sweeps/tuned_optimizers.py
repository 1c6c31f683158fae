r"""Every optimizer at the best of its rates in all_optimizers.py, on images of full size.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/tuned_optimizers.py \
        --study runs/studies/tuned_optimizers --seeds 3 --config.train.inner_steps 45 --config.train.outer_steps 15
"""

RATES = {"lamb": 0.01, "adam": 0.003, "sgd": 0.1, "nadamw": 0.01, "lars": 10.0, "muon": 0.3, "soap": 0.03}


def suggest(trial):
    trial.suggest_categorical("optimizer.name", list(RATES))


def derive(config):
    config.optimizer.learning_rate = RATES[config.optimizer.name]

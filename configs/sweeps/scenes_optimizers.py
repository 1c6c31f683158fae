r"""LAMB, Adam and Muon on masks and depths at a batch of 1,024, each at rates of its own; 40 steps.

    python sweep.py --config configs/scenes_tiny.py --space configs/sweeps/scenes_optimizers.py \
        --study runs/studies/scenes_optimizers --config.batch.size 1024 --config.train.inner_steps 10 \
        --config.train.outer_steps 4 --config.schedule.warmup_steps 10 --best_seeds 3
"""

RATES = {"lamb": [3e-3, 1e-2, 3e-2, 0.1], "adam": [1e-3, 3e-3, 1e-2, 3e-2], "muon": [3e-2, 0.1, 0.3]}


def suggest(trial):
    optimizer = trial.suggest_categorical("optimizer.name", list(RATES))
    trial.suggest_categorical("optimizer.learning_rate", RATES[optimizer])

"""knees.py at 256 and 1,024, for the optimizers that do not reach the target with batches of 2,048 and more.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/knees_between.py \\
        --study runs/studies/knees_between --pruner median --best_seeds 3 --config.train.target_accuracy 0.9 \\
        --config.dataset.image_size 32
"""

from optuna.distributions import CategoricalDistribution

from configs.sweeps import knees

GROUPS = knees.GROUPS
includes = knees.includes
refine = knees.refine
derive = knees.derive


def get_space():
    space = knees.get_space()
    space["optimizer.name"] = CategoricalDistribution(["sgd", "lamb"])
    space["batch.size"] = CategoricalDistribution([256, 1024])
    return space

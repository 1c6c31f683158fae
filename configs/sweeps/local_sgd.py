r"""Devices that average every step, every 4 and every 16, and from half way on; for eight devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python sweep.py --config configs/eurosat_muon.py \
        --space configs/sweeps/local_sgd.py --study runs/studies/local_sgd --seeds 3 --config.dataset.image_size 32
"""

STEPS = 680


def suggest(trial):
    mode = trial.suggest_categorical("sync.mode", ["every_step", "local", "post_local"])
    trial.suggest_categorical("sync.every", [1] if mode == "every_step" else [4, 16])


def derive(config):
    config.batch.size = 512
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.2
    config.train.inner_steps, config.train.outer_steps = 40, STEPS // 40
    if config.sync.mode == "post_local":
        config.sync.start_step = STEPS // 2

r"""What each ingredient of eurosat_muon.py is worth: the recipe with one thing changed at a time.

    python sweep.py --config configs/eurosat_muon.py --space configs/sweeps/ablation.py \
        --study runs/studies/ablation --seeds 3 --config.dataset.image_size 32

The first value of each field is the recipe's own. Its optimizer has a study of its own: tuned_optimizers.py.
"""

CHOICES = {
    "model.name": ["resconvnet", "convnet"],
    "model.norm": ["batch", "group", "none"],
    "model.stem": ["conv", "whitened"],
    "model.zero_head": [False, True],
    "schedule.name": ["linear", "cosine", "constant"],
    "schedule.warmup_steps": [67, 1],
    "optimizer.nesterov": [True, False],
    "optimizer.bias_multiplier": [1.0, 8.0],
    "optimizer.weight_decay": [0.0, 0.05],
    "train.label_smoothing": [0.0, 0.1],
    "augment.shift": [0, 2],
    "batch.size": [128, 512],
}


def suggest(trial):
    changed = False
    for field, choices in CHOICES.items():
        value = trial.suggest_categorical(field, choices[:1] if changed else choices)
        changed = changed or value != choices[0]


def derive(config):
    if config.model.norm != "batch":
        config.batch.ghost_size = None
    if config.batch.size != 128:  # as many images in fewer steps
        factor = config.batch.size // 128
        config.train.inner_steps = -(-config.train.inner_steps // factor)
        config.schedule.warmup_steps = -(-config.schedule.warmup_steps // factor)

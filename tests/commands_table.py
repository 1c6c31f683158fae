"""How each command of the pages runs in tests/test_commands.py: on few small images, for few steps.

A row has a pattern, in which `*` stands for anything. The first row that matches a command says how it runs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The way in which commands that match a pattern run.

    Attributes:
      pattern: the command without its comment; `*` stands for anything.
      add: arguments behind those of the command, which count more.
      dots: what stands in the place of "..." in the command.
      makes: files and folders that it writes beside those that its arguments name.
      prints: texts that it prints.
      needs: a target of --compile_for whose compiler must be installed.
      shell: the shell's line, in which {} is the command.
      skip: why it does not run here; "" where it does.
    """

    pattern: str
    add: str = ""
    dots: str = ""
    makes: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    needs: str = ""
    shell: str = "{}"
    skip: str = ""


# What stands in the place of placeholders and large numbers, in this order.
FILL = {
    "--branch runs/NAME": "--branch runs/trunk",
    "--branch RUN": "--branch runs/trunk",
    "evaluate.py RUN": "evaluate.py runs/eurosat",
    "runs/studies/NAME": "runs/studies/optimizers",
    "runs/NAME": "runs/eurosat",
    "runs/theirs": "runs/eurosat",
    "runs/a runs/b": "runs/eurosat runs/trunk",
    "--workdir DIR": "--workdir runs/eurosat",
    "configs/NAME": "configs/eurosat_fast.py",
    "path FOLDER": "path mine",
    "--images NEW_IMAGES": "--images mine",
    "seed S": "seed 1",
    "_tiny-S": "_tiny-1",
    "_unet-S": "_unet-1",
    "eurosat-spatial-": "lists/eurosat-",
    "--hosts 4": "--hosts 2",
    "--devices 8": "--devices 2",
    "num_hosts 4": "num_hosts 2",
    "HOST:PORT": "localhost:$PORT",
    "--workers 4": "--workers 2",
    "max_size 4096": "max_size 256",
    "(300, 450)": "(1, 2)",
    "=--xla_force_host_platform_device_count=8": "='--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0'",
}
ZIP = "--config.dataset.path EuroSAT.zip"
MINIMAL = "--inner_steps 1 --outer_steps 1 --batch_size 64"
STEP = "--config.train.inner_steps 1 --config.train.outer_steps 1"
STEPS = "--config.train.inner_steps 1 --config.train.outer_steps 3"
WARMUP = "--config.schedule.warmup_steps 1"
SYNTHETIC = f"{STEP} --config.dataset.num_examples 60 --config.dataset.image_size 8"
SMALL = "--config.dataset.image_size 8"
EUROSAT = f"{ZIP} {STEPS} {SMALL} --config.batch.size 64"
AVERAGED = f"{EUROSAT} --config.train.ema_decay 0.9"
MUON = f"{EUROSAT} {WARMUP}"
SCENES = f"{STEPS} {WARMUP} --config.batch.size 16 --config.dataset.num_examples 60 --config.dataset.image_size 16"
RECIPE = f"{STEPS} {WARMUP} {SMALL} --config.batch.size 64"
OWN_IMAGES = f"{SMALL} --config.batch.size 16 --config.train.outer_steps 2"
IMAGENET = f"--config.model.name resnet8 {SMALL} --config.schedule.decay_steps '(1, 2)'"
# Compiles quickly.
PLAIN = f"{ZIP} --config.model.name convnet --config.model.norm none --config.batch.ghost_size None {SMALL}"
STUDY = "--config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies"
ROWS = (
    # What does not run here.
    Row("make *", skip="it runs these tests, installs gigabytes, or takes hours; tests/test_readme.py trains"),
    Row("pip install *", skip="needs a network; tests/test_docs.py finds the files that it names"),
    Row("python bench.py *", skip="measures for minutes; tests/test_bench.py measures small ones"),
    Row("srun *", skip="tests/launch/test_schedulers.py starts runs by Slurm where it is there"),
    Row("mpirun *", skip="tests/launch/test_schedulers.py starts runs by Open MPI where it is there"),
    Row("sbatch *", skip="tests/launch/test_schedulers.py starts it where Slurm is there"),
    Row("export ZONE=*", skip="tests/launch/test_tpu_vm.py runs the script with a stand-in for gcloud"),
    Row("launch/tpu_vm.sh *", skip="tests/launch/test_tpu_vm.py runs it with a stand-in for gcloud"),
    Row(". .venv/compilers/bin/activate", skip="the environment that `make compilers` makes"),
    Row("*--storage *", skip="tests/studies/test_postgres.py runs studies in PostgreSQL"),
    Row("*--workdir gs://*", skip="tests/buckets runs it with emulators of buckets"),
    # Programs for hardware that is not here.
    Row("*scenes_30m.py --compile_for v3:*", "--config.model.name resunet_tiny", needs="v3:2x2"),
    Row("*--compile_for v3:*", dots="configs/eurosat.py", needs="v3:4x4"),
    Row("*--compile_for h200*", needs="h200"),
    # Other programs, and the scripts beside train.py and sweep.py.
    Row(". .venv/bin/activate"),
    Row(".venv/bin/python -m pytest *"),
    Row("sha256sum *", shell="cd runs/eurosat_model && {}", prints=("model.safetensors: OK",)),
    Row(
        "python minimal.py*",
        MINIMAL,
        prints=("step 1 ", "final val accuracy"),
    ),
    Row("python evaluate.py runs/scenes --split test", prints=("test split", "mean iou")),
    Row("python evaluate.py * --split test*", prints=("test split", "accuracy", "macro F1")),
    Row("python evaluate.py runs/eurosat", prints=("val split", "accuracy")),
    Row("python evaluate.py *"),
    Row(
        "python export.py runs/eurosat *",
        makes=("runs/eurosat_model/model.safetensors", "runs/eurosat_model/README.md"),
    ),
    Row("python export.py *"),
    Row("python report.py *--out *"),
    Row("python report.py *", makes=("report.html",)),
    Row("python augment.py --config configs/eurosat.py *", ZIP),
    Row("python augment.py *", SCENES, dots="configs/scenes_tiny.py"),
    # Pods.
    Row(
        "python train.py --config.devices.coordinator_address *",
        SYNTHETIC,
        dots="--workdir runs/both",
        shell="{0} & {0} --config.devices.host_index 1 && wait $!",
    ),
    Row("python -m largebatch.pod *train.py ...", SYNTHETIC),
    Row("python -m largebatch.pod *eurosat_v3_32.py *", f"{ZIP} {STEP} {SMALL}"),
    Row("python -m largebatch.pod --availability *", EUROSAT, prints=("starting on 1 host", "starting on 2 hosts")),
    Row("python -m largebatch.pod *", EUROSAT),
    # Runs.
    Row("python train.py", SYNTHETIC),
    Row("python train.py ...", SYNTHETIC),
    Row("python train.py --workdir *"),
    Row("*--show_batches", f"{ZIP} {STEPS}", prints=("3 steps, batch 512",)),
    Row("*--config.batch.trace runs/studies/*", f"{PLAIN} {STEPS} {WARMUP}"),
    Row("*--config.batch.trace *", f"{ZIP} {STEPS} {SMALL}"),
    Row("*--config.schedule.decay_by *", f"{MUON} {PLAIN}"),
    Row("*--config.batch.size full *", f"{ZIP} {STEP} {SMALL}"),
    Row("*--profile", f"{EUROSAT} --workdir runs/profiled", makes=("runs/profiled/profile",)),
    Row("*--config.log.wandb *", EUROSAT, makes=("runs/tracked/wandb",)),
    Row("*--workdir runs/eurosat", AVERAGED),  # which others evaluate
    Row("*--workdir runs/trunk", f"{MUON} {PLAIN} --config.optimizer.name lamb"),
    Row("python train.py --config configs/own_images.py *", OWN_IMAGES),
    Row("python train.py --config configs/imagenet_resnet50.py *", f"{MUON} {IMAGENET}"),
    Row("python train.py --config configs/scenes_30m.py *", f"{SCENES} --config.model.name resunet_tiny"),
    Row("python train.py --config configs/scenes_*", SCENES),
    Row("python train.py --config configs/eurosat_v3_32.py --workdir *", f"{ZIP} {STEP} {SMALL}"),
    Row("python train.py --config configs/eurosat_ms.py *", RECIPE),
    Row("python train.py --config configs/cifar10_*", RECIPE),
    Row("python train.py --config configs/eurosat.py *", EUROSAT),
    Row("python train.py --config *", MUON),
    # Studies; `SPACES` has what stays of their grids.
    Row("python sweep.py ... --sampler *", f"{EUROSAT} --trials 3", f"{STUDY}/tpe"),
    Row("python sweep.py ... --seeds 5", f"{EUROSAT} --seeds 2", f"{STUDY}/seeds"),
    Row("python sweep.py ... --best_seeds 3", f"{EUROSAT} --best_seeds 2", f"{STUDY}/best"),
    Row(
        "python sweep.py *--branch *",
        "--branch_images 512 --branch_sizes 64,128 --branch_steps 2",
        makes=("runs/studies/branches/batch_warmup.csv",),
        prints=("critical_batch",),
    ),
    Row("python sweep.py --study *"),
    Row("*/tuned_optimizers.py *", f"{PLAIN} {STEPS} {WARMUP}"),
    Row("*/ablation.py *", f"{ZIP} {STEPS} {WARMUP} {SMALL}"),
    Row("*/cifar10_critical_batch.py *", f"{PLAIN} --config.dataset.path CIFAR-10-jpeg.zip"),
    Row("*/sweeps/scenes_*", SCENES),
    Row("*/sweeps/optimizers.py *", f"{EUROSAT} {SMALL}"),
    Row("*/sweeps/recipes.py *", f"{EUROSAT} {SMALL} --trials 2"),
    Row("*python sweep.py *", PLAIN),
)

# ---- pages, and the commands of others that stand before theirs; what an earlier page has runs once ------

A_STUDY = f"python sweep.py {STUDY}/optimizers"
A_RUN_OF_SCENES = "python train.py --config configs/scenes_tiny.py --workdir runs/scenes"
# Every page begins in a folder where these have run.
BEFORE = (
    "python train.py --config configs/eurosat.py --workdir runs/eurosat",
    "python export.py runs/eurosat --out runs/eurosat_model",
    "python train.py --config configs/eurosat_muon.py --config.schedule.name constant --config.checkpoint.keep 5 "
    "--workdir runs/trunk",
)
PAGES = {
    "README.md": (),
    "CONTRIBUTING.md": (),
    "docs/batches.md": (),
    "docs/benchmarks.md": (),
    "docs/export.md": (),
    "docs/guarantees.md": (),
    "docs/hardware.md": (),
    "docs/maps.md": (),
    "docs/pods.md": (),
    "docs/studies.md": (A_STUDY,),
    "docs/training.md": (),
    "docs/results.md": (),
    "configs/*.py": (),
    "*.py": (A_RUN_OF_SCENES, A_STUDY),
    "configs/sweeps/*.py": (),
}

# ---- studies ----------------------------------------------------------------------------------------

# For each file of configs/sweeps, the values of its fields that stay in its grid.
RATES = "optimizer.learning_rate"
SPACES = {
    "all_optimizers": {"optimizer.name": ["lamb", "soap"], RATES: [0.003]},
    "tuned_optimizers": {"optimizer.name": ["lamb", "nadamw"]},
    "ablation": {"schedule.warmup_steps": [1]},
    "critical_batch": {"optimizer.name": ["sgd", "lamb"], "batch.size": [128], RATES: [0.1, 0.01]},
    "critical_batch_between": {"batch.size": [256], RATES: [0.1, 0.01]},
    "critical_batch_lamb": {"batch.size": [128], RATES: [0.01]},
    "cifar10_critical_batch": {"batch.size": [128], RATES: [0.1, 0.03]},
    "adascale": {},
    "batch_growth": {},
    "batch_schedules": {},
    "local_sgd": {"sync.mode": ["every_step", "post_local"], "sync.every": [1, 4]},
    "scenes_losses": {"task.mask_loss": ["cross_entropy", "dice"], "task.depth_loss": ["l1"]},
    "scenes_optimizers": {"optimizer.name": ["lamb", "adam"], RATES: [0.01]},
    "optimizers": {"optimizer.name": ["lamb", "sgd"], RATES: [0.003, 0.01]},
    "recipes": {},
}
# Is added to each of these files: the grid becomes small, the runs short.
SHORT_STUDY = """
if "PARTS" in globals():  # of critical_batch.py: steps of its runs
    PARTS = [4, 3, 2]
_suggest, _derive, _searched = suggest, globals().get("derive"), set()
class Fewer:
    def __init__(self, trial):
        self.trial = trial
    def __getattr__(self, name):
        return getattr(self.trial, name)
    def suggest_categorical(self, name, choices):
        _searched.add(name)
        kept = [choice for choice in choices if choice in KEPT.get(name, choices)]
        return self.trial.suggest_categorical(name, kept)
def suggest(trial):
    _suggest(Fewer(trial))
def derive(config):
    if _derive:
        _derive(config)
    short = {"train.inner_steps": 1, "train.outer_steps": 3, "schedule.warmup_steps": 1}
    short |= {"schedule.decay_steps": (1, 2)[: len(config.schedule.decay_steps)]}
    short |= {"sync.start_step": min(config.sync.start_step, 1)}
    config.update_from_flattened_dict({field: v for field, v in short.items() if field not in _searched})
"""

"""How each command of the pages runs in tests/test_commands.py: on few small images, for few updates.

A row has a pattern, in which `*` stands for anything. Each command has exactly one row, of its page or of
`EVERYWHERE`, and each row a command.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """The way in which commands that match a pattern run.

    Attributes:
      pattern: the command without its comment; `*` stands for anything.
      add: arguments behind those of the command, which count more.
      fill: what stands in the place of texts of the command, such as placeholders.
      makes: files and folders that it writes beside those that its arguments name.
      prints: texts that it prints.
      code: its exit code.
      needs: a target of --compile_for whose compiler must be installed.
      shell: the shell's line, in which {} is the command.
      skip: why it does not run here; "" where it does.
    """

    pattern: str
    add: str = ""
    fill: dict[str, str] = field(default_factory=dict)
    makes: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    code: int = 0
    needs: str = ""
    shell: str = "{}"
    skip: str = ""


@dataclass(frozen=True)
class Page:
    """The rows of one page.

    Attributes:
      first: (page, command) of other pages that a reader has run before.
    """

    rows: tuple[Row, ...] = ()
    first: tuple[tuple[str, str], ...] = ()


ZIP = "--config.dataset.path EuroSAT.zip"
STEP = "--config.train.inner_steps 1 --config.train.outer_steps 1"
STEPS = "--config.train.inner_steps 1 --config.train.outer_steps 3"
WARMUP = "--config.schedule.warmup_updates 1"
SYNTHETIC = f"{STEP} --config.dataset.num_examples 60 --config.dataset.image_size 8"
EUROSAT = f"{ZIP} {STEPS} --config.batch.size 64"
AVERAGED = f"{EUROSAT} --config.train.ema_decay 0.9"
MUON = f"{EUROSAT} {WARMUP}"
SCENES = f"{STEPS} {WARMUP} --config.batch.size 16 --config.dataset.num_examples 60 --config.dataset.image_size 16"
BRANCHES = "--branch_images 512 --branch_sizes 64,128 --branch_steps 2"
RECIPE = f"{STEPS} {WARMUP} --config.batch.size 64"
OWN_IMAGES = "--config.dataset.image_size 8 --config.batch.size 16 --config.train.outer_steps 2"
PLAIN = (
    f"{ZIP} --config.model.name convnet --config.model.norm none --config.batch.ghost_size None"  # compiles quickly
)
POD = {"--hosts 4": "--hosts 2", "--devices 8": "--devices 2"}


def study(name: str, add: str = PLAIN, **others) -> Row:
    """The row of the studies with a space of configs/sweeps; `SPACES` has what stays of its grid."""
    pattern = f"*python sweep.py *--space configs/sweeps/{name}.py*"
    return Row(pattern, f"{add} --config.dataset.image_size {'16' if 'scenes' in name else '8'}", **others)


def recipe(name: str, add: str = RECIPE) -> Row:
    """The row of the runs of a config."""
    return Row(f"python train.py --config configs/{name}.py *", add)


# ---- what does not run, on any page -----------------------------------------------------------------

MEASURES = "measures for minutes, at a size that no flag makes smaller; tests/test_bench.py measures a small one"
EVERYWHERE = (
    Row("make train", skip="tests/test_readme.py runs it on a fresh clone"),
    Row("make compilers", skip="installs gigabytes; `make test-compilers` does the same first"),
    Row("make test*", skip="it runs these tests"),
    Row("make lint", skip="it looks at the code"),
    Row("make bench", skip=MEASURES),
    Row("make faults", skip="takes hours; `make test-full` has its short part"),
    Row("make results *", skip="takes hours; tests/test_results.py looks at its jobs"),
    Row("pip install *", skip="needs a network; tests/test_docs.py finds the files that it names"),
    Row("python bench.py step*", skip=MEASURES),
    Row("python bench.py scaling*", skip=MEASURES),
    Row("python bench.py input*", skip=MEASURES),
    Row("python bench.py stream*", skip=MEASURES),
    Row("python bench.py results *", skip="takes hours; tests/test_results.py looks at its jobs"),
    Row("python bench.py compile*", skip=MEASURES),
    Row("python bench.py card*", skip="takes ten minutes; tests/test_card.py measures a small one"),
    Row("srun *", skip="tests/launch/test_schedulers.py starts runs by Slurm where it is there"),
    Row("mpirun *", skip="tests/launch/test_schedulers.py starts runs by Open MPI where it is there"),
)

# ---- pages ------------------------------------------------------------------------------------------

A_RUN = ("README.md", "python train.py --config configs/eurosat.py --workdir runs/eurosat")
AN_EXPORT = ("README.md", "python export.py runs/eurosat --out model")
A_STUDY = (
    "docs/studies.md",
    "python sweep.py --config configs/eurosat.py --space configs/sweeps/optimizers.py "
    "--study runs/studies/optimizers",
)
A_RUN_OF_SCENES = ("docs/maps.md", "python train.py --config configs/scenes_tiny.py --workdir runs/scenes")
A_TRUNK = (
    "docs/batches.md",
    "python train.py --config configs/eurosat_muon.py --config.schedule.name constant --config.checkpoint.keep 5 "
    "--workdir runs/trunk",
)
README = (
    Row(". .venv/bin/activate"),
    Row("python minimal.py", "--inner_steps 1 --outer_steps 1", prints=("step 1 ", "final val accuracy")),
    Row("python train.py --config configs/eurosat.py --workdir *", AVERAGED),
    Row("python evaluate.py runs/eurosat --split test", prints=("test split", "accuracy")),
    Row("python report.py runs/eurosat", makes=("report.html",)),
    Row("python export.py runs/eurosat --out model", makes=("model/model.safetensors", "model/README.md")),
    Row("python train.py --config configs/eurosat_v3_32.py --work*", f"{ZIP} {STEP}"),
    Row("python train.py --config configs/own_images.py *", OWN_IMAGES, {"FOLDER": "mine"}),
    Row(
        "python train.py --config configs/NAME *",
        MUON,
        {"configs/NAME": "configs/eurosat_fast.py", "seed S": "seed 1"},
    ),
    Row("python train.py --config ... *", fill={"...": "configs/eurosat.py"}, needs="v3:4x4"),
    Row("python train.py ...", SYNTHETIC, {" ...": ""}),
    Row("python -m largebatch.pod *", SYNTHETIC, POD | {" ...": ""}),
)
BATCHES = (
    Row("*--config.schedule.decay_by batch", MUON, {"(300, 450)": "(1, 2)"}),
    Row("*--config.schedule.decay_by seesaw *", MUON),
    Row("python train.py *--show_batches", f"{ZIP} {STEPS}", prints=("3 steps, batch 512",)),
    Row("*--config.batch.trace trace.csv --config.schedule.scaling linear", f"{ZIP} {STEPS}"),
    Row("*--config.batch.trace spot.csv *", f"{ZIP} {STEPS}"),
    Row("*--config.batch.auto *", EUROSAT, {"max_size 4096": "max_size 256"}),
    Row("*--workdir runs/trunk", MUON),
    Row(
        "python sweep.py --branch runs/trunk *",
        BRANCHES,
        makes=("runs/studies/branches/batch_warmup.csv",),
        prints=("critical_batch",),
    ),
    Row("*--config.batch.trace runs/studies/branches/batch_warmup.csv *", f"{ZIP} {STEPS} {WARMUP}"),
    Row("*--config.schedule.scaling adascale *", EUROSAT),
    Row("*--config.sync.mode local *", EUROSAT),
)
EXPORT = (
    Row("python export.py runs/eurosat --out model", makes=("model/model.safetensors", "model/model.stablehlo")),
    Row("python export.py runs/NAME --out average --ema", fill={"NAME": "eurosat"}),
    Row("python evaluate.py model --split test", prints=("accuracy",)),
    Row("python evaluate.py model --images photos.zip --out photos.csv"),
    Row("sha256sum *", fill={"sha256sum": "cd model && sha256sum"}, prints=("model.safetensors: OK",)),
)
HARDWARE = (
    Row(". .venv/compilers/bin/activate", skip="the environment that `make compilers` makes"),
    Row("python train.py *eurosat_v3_32.py --compile_for v3:*", needs="v3:4x4"),
    Row("python train.py *scenes_30m.py --compile_for v3:*", "--config.model.name resunet_tiny", needs="v3:2x2"),
    Row("python train.py *--compile_for h200:8", needs="h200"),
    Row("python train.py *--compile_for h200", needs="h200"),
)
MAPS = (
    Row("python train.py --config configs/scenes_tiny.py --workdir *", SCENES),
    Row("python evaluate.py runs/scenes --split test", prints=("mean iou",)),
    Row("python evaluate.py runs/scenes --images photos --out maps"),
    Row("python report.py runs/scenes --out page.html"),
    Row("python augment.py * --export swapped", SCENES),
    Row("python evaluate.py runs/scenes --images swapped", prints=("mean iou",)),
    Row("python augment.py --config ... *", SCENES, {"...": "configs/scenes_tiny.py"}),
)
PODS = (
    Row("export ZONE=*", skip="tests/launch/test_tpu_vm.py runs the script with a stand-in for gcloud"),
    Row("launch/tpu_vm.sh *", skip="tests/launch/test_tpu_vm.py runs it with a stand-in for gcloud"),
    Row("sbatch *", skip="tests/launch/test_schedulers.py starts it where Slurm is there"),
    Row(
        "python train.py --config.devices.coordinator_address HOST:PORT *",
        SYNTHETIC,
        {"HOST:PORT": "localhost:$PORT", "num_hosts 4": "num_hosts 2", "...": "--workdir runs/both"},
        shell="{0} & {0} --config.devices.host_index 1 && wait $!",
    ),
    Row("python -m largebatch.pod --hosts * -- python train.py ...", SYNTHETIC, POD | {" ...": ""}),
    Row("python -m largebatch.pod --hosts *--config.batch.size 2048", EUROSAT, POD),
    Row("python -m largebatch.pod --hosts *--config configs/eurosat_v3_32.py *", f"{ZIP} {STEP}", POD),
    Row("python -m largebatch.pod --availability *", EUROSAT, {"--hosts 4": "--hosts 2"}),
)
EIGHT = "--xla_force_host_platform_device_count=8"
SWEEPS = {
    "all_optimizers": study("all_optimizers"),
    "tuned_optimizers": study("tuned_optimizers", f"{PLAIN} {STEPS} {WARMUP}"),
    "ablation": study("ablation", f"{ZIP} {STEPS} {WARMUP}"),
    "knees": study("knees"),
    "knees_between": study("knees_between"),
    "knees_lamb": study("knees_lamb"),
    "cifar10_knees": study("cifar10_knees", f"{PLAIN} --config.dataset.path CIFAR-10-jpeg.zip"),
    "adascale": study("adascale"),
    "batch_growth": study("batch_growth"),
    "batch_schedules": study("batch_schedules"),
    "local_sgd": study("local_sgd", fill={EIGHT: f"'{EIGHT} --xla_backend_optimization_level=0'"}),
    "scenes_losses": study("scenes_losses", SCENES),
    "scenes_optimizers": study("scenes_optimizers", SCENES),
    "optimizers": study("optimizers", EUROSAT),
    "recipes": study("recipes", f"{EUROSAT} --trials 2"),
}
RESULTS = (
    Row("python train.py *--config.dataset.split_file *", MUON, {"eurosat-spatial-": "lists/eurosat-"}),
    Row("python evaluate.py runs/spatial --split test", prints=("macro F1",)),
    SWEEPS["tuned_optimizers"],
    Row("python report.py runs/studies/* --updates_to *", makes=("report.html",)),
    SWEEPS["ablation"],
    SWEEPS["knees"],
    SWEEPS["batch_schedules"],
    Row(
        "python train.py --config configs/NAME *", MUON, {"configs/NAME": "configs/eurosat.py", "seed S": "seed 1"}
    ),
    Row("python evaluate.py RUN --split test", fill={"RUN": "runs/eurosat"}, prints=("test split",)),
    SWEEPS["knees_between"],
    SWEEPS["knees_lamb"],
    SWEEPS["cifar10_knees"],
    Row("python train.py *--workdir runs/scenes_tiny-S", SCENES, {"-S": "-1", "seed S": "seed 1"}),
    Row("python train.py *--workdir runs/scenes_unet-S", SCENES, {"-S": "-1", "seed S": "seed 1"}),
    SWEEPS["scenes_losses"],
    SWEEPS["scenes_optimizers"],
)
STUDY = "--config configs/eurosat.py --space configs/sweeps/optimizers.py --study runs/studies"
STUDIES = (
    SWEEPS["optimizers"],
    Row("python sweep.py --study runs/studies/optimizers"),
    Row("python sweep.py --study runs/studies/optimizers --workers 2"),
    Row("python sweep.py ... --sampler tpe *", f"{EUROSAT} --trials 3", {"...": f"{STUDY}/tpe"}),
    Row("python sweep.py ... --seeds 5", f"{EUROSAT} --seeds 2", {"...": f"{STUDY}/seeds"}),
    Row("python sweep.py ... --best_seeds 3", f"{EUROSAT} --best_seeds 2", {"...": f"{STUDY}/best"}),
    Row("python sweep.py ... --storage *", skip="tests/studies/test_postgres.py runs studies in PostgreSQL"),
    Row("python sweep.py * --branch runs/NAME", BRANCHES, {"NAME": "trunk"}, prints=("critical_batch",)),
    Row("python report.py runs/studies/* --png pictures *", makes=("report.html",)),
    Row("python report.py runs/studies/* --updates_to *", makes=("report.html",)),
    Row(
        "python report.py runs/a runs/b",
        fill={"runs/a": "runs/eurosat", "runs/b": "runs/trunk"},
        makes=("report.html",),
    ),
)
TRAINING = (
    Row("python train.py", SYNTHETIC),
    Row("*--config.dataset.path EuroSAT.zip --workdir runs/eurosat", AVERAGED),
    Row("python train.py --workdir DIR", fill={"DIR": "runs/eurosat"}),
    Row("*--config.batch.size full *", f"{ZIP} {STEP}"),
    Row("*--config.dataset.split_file *", AVERAGED),
    Row("python augment.py --config configs/eurosat.py --preview views.png", ZIP),
    Row("*--config.train.init_from runs/eurosat *", AVERAGED),
    Row("*--workdir gs://BUCKET/*", skip="tests/buckets runs it with emulators of buckets"),
    Row("*--config.log.wandb *", AVERAGED, makes=("runs/tracked/wandb",)),
    Row("*--doctor", AVERAGED),
    Row("*--profile", f"{AVERAGED} --workdir runs/profiled", makes=("runs/profiled/profile",)),
    Row("python evaluate.py runs/eurosat", prints=("val split",)),
    Row("python evaluate.py runs/eurosat --split test --out test.csv"),
    Row("python evaluate.py runs/eurosat --images photos.zip"),
    Row("python evaluate.py runs/eurosat --split test --views*", prints=("accuracy",)),
    Row("python evaluate.py runs/NAME --split test --views --ema", fill={"NAME": "eurosat"}, prints=("average",)),
)
IMAGENET = "--config.dataset.image_size 8 --config.schedule.decay_steps '(1, 2)'"
CONFIGS = (
    Row("python train.py", SYNTHETIC),
    recipe("cifar10_fast", RECIPE),
    Row("python evaluate.py * --split test*", prints=("accuracy",)),
    recipe("cifar10_resnet8"),
    recipe("cifar10_speedrun", RECIPE),
    recipe("eurosat"),
    recipe("eurosat_best"),
    recipe("eurosat_fast"),
    recipe("eurosat_full_batch"),
    recipe("eurosat_full_batch_soap"),
    recipe("eurosat_ms"),
    recipe("eurosat_muon"),
    recipe("eurosat_seed"),
    recipe("eurosat_v3_32"),
    Row("python -m largebatch.pod *", STEP, POD),
    recipe("imagenet_resnet50", f"{MUON} --config.model.name resnet8 {IMAGENET}"),
    Row("python train.py --config configs/own_images.py *", OWN_IMAGES, {"FOLDER": "mine"}),
    recipe("scenes_30m", f"{SCENES} --config.model.name resunet_tiny"),
    recipe("scenes_tiny", SCENES),
)
SCRIPTS = (
    Row("python train.py", SYNTHETIC),
    Row("python train.py --config configs/eurosat.py --workdir runs/eurosat", AVERAGED),
    Row("python train.py --workdir runs/eurosat"),
    Row("python train.py *--config.optimizer.name sgd --config.batch.size 1024", EUROSAT),
    Row("python train.py *--doctor", AVERAGED),
    Row("python train.py *--compile_for v3:4x4", needs="v3:4x4"),
    Row("python augment.py --config configs/eurosat.py *", ZIP),
    Row("python augment.py * --export scenes", SCENES),
    Row("python minimal.py", "--inner_steps 1 --outer_steps 1", prints=("step 1 ", "final val accuracy")),
    Row("python minimal.py --path *", "--inner_steps 1 --outer_steps 1", prints=("step 1 ", "final val accuracy")),
    Row("python evaluate.py runs/eurosat*"),
    Row("python evaluate.py runs/NAME *", fill={"NAME": "eurosat"}),
    Row("python evaluate.py runs/scenes *"),
    Row("python evaluate.py runs/theirs *", fill={"theirs": "eurosat"}),
    Row("python evaluate.py model *"),
    Row("python export.py runs/eurosat --out model"),
    Row("python export.py runs/NAME *", fill={"NAME": "eurosat"}),
    Row("python sweep.py --config * --study runs/studies/NAME", SWEEPS["optimizers"].add, {"NAME": "optimizers"}),
    Row("python sweep.py --study runs/studies/NAME", fill={"NAME": "optimizers"}),
    Row("python sweep.py --study runs/studies/NAME --workers 4", fill={"NAME": "optimizers", "4": "2"}),
    Row("python sweep.py * --branch RUN", BRANCHES, {"RUN": "runs/trunk"}, prints=("critical_batch",)),
    Row("python sweep.py ... --sampler *", f"{EUROSAT} --trials 3", {"...": f"{STUDY}/tpe"}),
    Row("python sweep.py ... --storage *", skip="tests/studies/test_postgres.py runs studies in PostgreSQL"),
    Row("python report.py runs/studies/optimizers", makes=("report.html",)),
    Row("python report.py runs/a runs/b *", fill={"runs/a": "runs/eurosat", "runs/b": "runs/trunk"}),
)
PAGES = {
    "README.md": Page(README),
    "CONTRIBUTING.md": Page((Row(".venv/bin/python -m pytest *"),)),
    "docs/batches.md": Page(BATCHES),
    "docs/benchmarks.md": Page(),
    "docs/export.md": Page(EXPORT, first=(A_RUN,)),
    "docs/guarantees.md": Page(),
    "docs/hardware.md": Page(HARDWARE),
    "docs/maps.md": Page(MAPS),
    "docs/pods.md": Page(PODS),
    "docs/results.md": Page(RESULTS, first=(A_RUN,)),
    "docs/studies.md": Page(STUDIES, first=(A_RUN, A_TRUNK)),
    "docs/training.md": Page(TRAINING),
    "configs/*.py": Page(CONFIGS),
    "*.py": Page(SCRIPTS, first=(A_RUN, AN_EXPORT, A_RUN_OF_SCENES, A_TRUNK, A_STUDY)),
    "configs/sweeps/*.py": Page(tuple(SWEEPS.values())),
}

# ---- studies ----------------------------------------------------------------------------------------

# For each file of configs/sweeps, the values of its fields that stay in its grid.
RATES = "optimizer.learning_rate"
SPACES = {
    "all_optimizers": {"optimizer.name": ["lamb", "soap"], RATES: [0.003]},
    "tuned_optimizers": {"optimizer.name": ["lamb", "nadamw"]},
    "ablation": {"schedule.warmup_updates": [1]},
    "knees": {"optimizer.name": ["sgd", "lamb"], "batch.size": [128], RATES: [0.1, 0.01]},
    "knees_between": {"batch.size": [256], RATES: [0.1, 0.01]},
    "knees_lamb": {"batch.size": [128], RATES: [0.01]},
    "cifar10_knees": {"batch.size": [128], RATES: [0.1, 0.03]},
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
if "PARTS" in globals():  # of knees.py: updates of its runs
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
    short = {"train.inner_steps": 1, "train.outer_steps": 3, "schedule.warmup_updates": 1}
    short |= {"schedule.decay_steps": (1, 2)[: len(config.schedule.decay_steps)]}
    short |= {"sync.start_step": min(config.sync.start_step, 1)}
    config.update_from_flattened_dict({field: v for field, v in short.items() if field not in _searched})
"""

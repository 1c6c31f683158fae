"""The fields of a config: each is stated here once, with its default, what is allowed and what it means.

    python train.py --config.optimizer.name sgd --config.batch.size 1024

The texts below fields are for users: docs/config.md is made of them, `configs/default.py` of the defaults. A new
field is a line here, and its use.
"""

from dataclasses import dataclass, replace

from largebatch.config.values import flag, integer, is_integer, is_text, number, one_of, stated, text

LARGEST_SEED = 2**32 - 1


def _is_side(value: object) -> bool:
    return is_integer(value, 8, 1024)


def _is_size(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) == 2 and all(map(_is_side, value))
    return value is None or _is_side(value)


def _are_steps(value: object) -> bool:
    return isinstance(value, list | tuple) and all(is_integer(step, 1) for step in value)


def _is_trace(value: object) -> bool:  # the sizes in a tuple are checked with the trace
    return value is None or isinstance(value, list | tuple) or is_text(value)


def _is_project(value: object) -> bool:
    return is_text(value) and len(value) <= 128 and not set(value) & set("/\\#?%:")


SIZES = "an integer from 8 to 1024, a tuple (height, width) of two, or None"
STEPS = "a tuple of integers >= 1"
TRACES = "a tuple of integers >= 1, the path of a CSV file, or None"
PROJECTS = r"1 to 128 characters, none of / \ # ? % :"


@dataclass(frozen=True)
class DatasetConfig:
    """The images."""

    name: str = text("synthetic", data=True)
    """`synthetic`, `scenes`, `eurosat`, the name of a TFDS set, or a name for your own images."""
    source: str = one_of("auto", "tfds", "zip", "folder", "synthetic", data=True)
    """Kind of source. `auto`: by name and path."""
    path: str | None = text(None, data=True, path=True)
    """A zip or folder of class folders, or of images/ with masks/, depths/ or both, perhaps within train, val and
    test folders; or a TFDS data directory."""
    splits: str = one_of("auto", "published", "own", data=True)
    """Training, validation and test images. `auto`: `split_file`, else the splits that the set is published with,
    else our random 80/10/10. `published`: never ours. `own`: always ours."""
    split_file: str | None = text(None, data=True, path=True)
    """CSV file with the columns id and split; or a path with {split} in it, for a file of ids for each of train,
    val and test. Images that it does not name are left out."""
    split_seed: int = integer(0, 0, LARGEST_SEED, data=True)
    """Seed of our split, and of what is cut from train where val or test is not published."""
    image_size: int | tuple[int, int] | None = stated(None, _is_size, SIZES, data=True)
    """Pixels to resize to: a square, or (height, width). None keeps the size."""
    resize: str = one_of("stretch", "crop", "pad", data=True)
    """How images are resized. `crop` takes the central part, `pad` adds black bars."""
    channels: int | None = integer(None, 1, 1024, data=True)
    """1 makes grey of RGB, 3 makes RGB of grey; any other number must be that of the files. None takes theirs."""
    tfds_split: str | None = text(None, data=True)
    """TFDS split(s) to read, as "train+test", to be split by us. None takes train, val and test as published."""
    num_examples: int = integer(480, 50, 10_000_000, data=True)
    """Number of synthetic images."""
    max_image_pixels: int = integer(89_478_485, 1, data=True, identity=False)
    """Most pixels of an image; one of more is refused before it is decoded."""


@dataclass(frozen=True)
class AugmentConfig:
    """Views of the training images, and random changes: each visit makes those that are on, in this order."""

    views: str = one_of("all", "flip", "none", data=True)
    """`all`: 8 views of each image, four rotations with and without a flip; for square images. `flip`: 2, with and
    without a flip left/right. `none`: the image as it is."""
    storage: str = one_of("auto", "expanded", "on_device", "streamed", data=True, identity=False)
    """Form of the training images on the devices. `expanded`: all views. `on_device`: the images; a view is made
    when it is read. `streamed`: images of the next steps, read while others run. `auto`: the first that fits."""
    crop_scale: float = number(1.0, "(0, 1]")
    """Smallest share of the area that a random crop has, which is resized back. 1: off."""
    shift: int = integer(0, 0)
    """Moves the image by up to so many pixels, edges reflected."""
    brightness: float = number(0.0, "[0, 1]")
    """Multiplies pixels by a random factor from 1 - this to 1 + this."""
    contrast: float = number(0.0, "[0, 1]")
    """Multiplies pixels' distance from their image's channel mean by a random factor from 1 - this to 1 + this."""
    cutout: int = integer(0, 0)
    """Side in pixels of a square that is set to the mean of the training images."""
    cache_dir: str = text("~/.cache/largebatch", data=True, identity=False, path=True)
    """Folder of data caches, downloads and compiled programs, on a disk of each host or one that all mount."""


@dataclass(frozen=True)
class TaskConfig:
    """The task that is learned."""

    name: str = one_of("classification", "segmentation", "depth", "mask_depth", data=True)
    """The task; it must be what the data set holds."""
    mask_loss: str = one_of("cross_entropy", "dice", "cross_entropy_dice", "focal")
    """Loss of masks."""
    depth_loss: str = one_of("l1", "berhu", "gradient")
    """Loss of depths."""
    depth_weight: float = number(1.0, "(0, inf)")
    """Weight of the depth's loss beside the mask's."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str = text("convnet")
    """convnet | resconvnet | resconvnet7 | resconvnet_wide | airbench | airbench_small | resnet8 | resnet50; for
    masks and depths resunet | resunet_tiny | unet_tiny."""
    dtype: str = one_of("float32", "bfloat16", "auto")
    """Dtype of the arithmetic; parameters stay float32. `auto`: bfloat16 on TPUs, GPUs and CPUs with AVX512_BF16 or
    AMX, else float32. A run or study keeps the one that it began with."""
    conv: str = one_of("auto", "dot", "lax", "lax_blocks")
    """Convolution. `dot`: slices and one matrix product. `lax_blocks`: `lax`, with a first layer for tensor cores.
    `auto`: `dot` on CPUs, `lax_blocks` on GPUs, else `lax`."""
    norm: str = one_of("auto", "none", "batch", "group")
    """Normalisation. `batch`: by the statistics of each ghost batch. `auto`: none for convnets, group for
    others."""
    norm_decay: float = number(0.9, "[0, 1)")
    """Decay per step of the running statistics of batch normalisation."""
    stem: str = one_of("conv", "whitened")
    """First layer of convnets and airbench. `whitened`: frozen, from the training images."""
    zero_head: bool = flag(False)
    """Starts the last layer at zero."""
    side_heads: bool = flag(False)
    """Linear classifiers behind inner layers of the convnets; the mean of their losses is added in training."""


@dataclass(frozen=True)
class BatchConfig:
    """The number of images per step, and how they are computed."""

    size: int | str = integer("full", 1)
    """Images per step over all devices, up to views x images. `full`: all of them."""
    micro_batch_size: int | str = integer("auto", 1)
    """Images per gradient evaluation on one device; a multiple of `ghost_size`."""
    ghost_size: int | None = integer(None, 2)
    """Largest number of images of a device that `model.norm` batch normalises together. None: a micro-batch."""
    virtual_shards: int | None = integer(None, 1, data=True)
    """Parts of the training set, from which a batch takes images in turn: at least as many as there will be
    devices. None chooses by the number of training images: 480 for EuroSAT."""
    trace: str | tuple[int, ...] | None = stated(None, _is_trace, TRACES, path=True)
    """In place of `size`: the batch size of every step, a CSV file with the columns step and batchsize, or a CSV
    file of available devices (a time or index, and GPUs, TPU_cores, ...). Steps that a file leaves out keep the
    size before."""
    per_device_batch_size: int | None = integer(None, 1)
    """Images per device and step: for the devices in a trace; or, in place of `size`, for those that are there at
    each start of the run."""
    time_per_step: float = number(1.0, "(0, inf)")
    """Time per step in a trace of devices, in the unit of its times; seconds where it has dates."""
    hold_last: bool = flag(False)
    """Keeps the last size of a trace until the end of the run."""
    auto: bool = flag(False)
    """After a validation the batch grows with the measured noise scale, from `size` by powers of two. With LAMB,
    Muon and SOAP-Muon that is about 2 to 20 times below the critical batch size, so it grows late or never."""
    max_size: int | str = integer("full", 1)
    """Largest batch of `auto`."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: str = one_of("lamb", "sgd", "lars", "adam", "adamw", "nadamw", "muon", "soap", "soap_muon")
    """The optimizer."""
    learning_rate: float = number(0.01, "(0, inf)")
    """Peak learning rate; at `schedule.reference_batch_size` if it is scaled."""
    momentum: float = number(0.9, "[0, 1)")
    """Momentum; b1 of the Adam family."""
    nesterov: bool = flag(False)
    """Nesterov momentum of sgd, lars and muon; of soap_muon only in its AdamW part."""
    momentum_correction: bool = flag(True)
    """Keeps the learning rate out of the momentum of sgd and lars."""
    b2: float = number(0.999, "[0, 1)")
    """Decay of Adam's second moment, and of soap's and soap_muon's preconditioner."""
    weight_decay: float = number(0.0, "[0, inf)")
    """Weight decay: in the gradient for sgd, lars and adam, decoupled for the others."""
    exclude_biases: bool = flag(True)
    """Biases and norms have no weight decay and no trust ratio."""
    clip_norm: float | None = number(None, "(0, inf)")
    """Largest norm of the whole gradient. None does not clip."""
    bias_multiplier: float = number(1.0, "(0, inf)")
    """Factor on the learning rate of biases and norms."""
    soap_every: int = integer(10, 1)
    """Steps between two refreshes of the bases of soap and soap_muon."""
    adamw_multiplier: float = number(1.0, "(0, inf)")
    """Factor on the learning rate of muon's and soap_muon's AdamW part: head, biases, norms."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of the learning rate."""

    name: str = one_of("constant", "linear", "cosine", "step")
    """Shape of the decay."""
    scaling: str = one_of("none", "linear", "sqrt", "adascale")
    """How the rate follows the batch size. `adascale`: by the measured gain, sgd only; then inner_steps x
    outer_steps, warm-up and decay steps count scale-invariant steps, each worth a step of the reference batch."""
    b2_scaling: str = one_of("none", "half_life")
    """How `optimizer.b2` follows the batch size. `half_life`: b2 ** (batch / reference), so that as many images as
    at the reference batch halve the weight of a gradient in the second moment."""
    reference_batch_size: int = integer(512, 1)
    """Batch size for which `learning_rate` and `b2` are right."""
    warmup_steps: int | None = integer(None, 1)
    """Steps of linear warm-up; the last has the peak rate. Give one of the three warm-up fields, or none."""
    warmup_epochs: float | None = number(None, "(0, inf)")
    """The warm-up in epochs: an epoch is all views of all images."""
    warmup_examples: int | None = integer(None, 1)
    """The warm-up in examples."""
    final_fraction: float = number(0.0, "[0, 1]")
    """Part of the peak rate at the end of `linear` and `cosine`."""
    decay_steps: tuple[int, ...] = stated((), _are_steps, STEPS)
    """Steps at which `step` decays."""
    decay_factor: float = number(0.1, "(0, 1)")
    """Factor of a decay of `step` and `seesaw`."""
    decay_by: str = one_of("rate", "batch", "seesaw")
    """Effect of a decay step. `batch`: the batch grows instead, and fewer steps see as many images. `seesaw`: the
    batch grows by as much, and the rate falls by the root of it; linear and cosine become steps. Where the batch
    grows, numbers of steps in a config count steps of the first batch size."""
    decay_over: str = one_of("steps", "images")
    """Unit that `linear` and `cosine` count; it matters where the batch size changes."""
    noise_decay: float = number(0.98, "[0, 1)")
    """Decay per measurement of the averages behind the noise scale and AdaScale's gain."""


@dataclass(frozen=True)
class SyncConfig:
    """Synchronisation of the devices."""

    mode: str = one_of("every_step", "local", "post_local")
    """`every_step`: one gradient psum per step. `local`: devices take steps of their own, and average their
    parameters every few of them. `post_local`: `every_step` at first, `local` from `start_step` on."""
    every: int = integer(1, 1)
    """Steps between two averages."""
    start_step: int = integer(0, 0)
    """First local step of `post_local`."""
    optimizer_state: str = one_of("average", "keep", "reset")
    """Treatment of the optimizer's state at an average."""
    outer_learning_rate: float = number(1.0, "(0, inf)")
    """Rate of the outer step at an average: SGD with Nesterov momentum (DiLoCo). 1 takes the average as it is."""
    outer_momentum: float = number(0.0, "[0, 1)")
    """Momentum of the outer step; 0 takes the average as it is."""


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run, and what happens on the way."""

    inner_steps: int | str = integer(10, 1, 1_000_000, "pass")
    """Steps between two validations. `pass`: as many as take every image about once (images / batch.size, rounded
    up; only where the batch size stays as it is)."""
    outer_steps: int = integer(5, 1)
    """Number of validations."""
    target_accuracy: float | None = number(None, "(0, 1]")
    """Stop when the validation accuracy reaches it."""
    target_score: float | None = number(None)
    """Stop when the score of any task reaches it."""
    label_smoothing: float = number(0.0, "[0, 1)")
    """Share of a label that is spread over all classes."""
    ema_decay: float | None = number(None, "[0, 1)")
    """Decay per step of a moving average of the parameters, which is validated too."""
    init_from: str | None = text(None, path=True)
    """Run folder: start from its best parameters."""
    init_step: int | None = integer(None, 1)
    """Start from the checkpoint of this step of `init_from` instead, with the optimizer's moments."""
    on_nonfinite: str = one_of("stop", "skip", "rollback")
    """Response to a loss or gradient that is not finite. `skip`: the step is not taken. `rollback`: training rolls
    back to the last saved validation."""
    max_nonfinite: int = integer(5, 1, 1_000_000)
    """Skipped steps in a row, or rollbacks in all, before the run has diverged."""
    rollback_factor: float = number(0.5, "(0, 1)")
    """Factor on the learning rate at a rollback."""

    @property
    def target(self) -> float | None:
        """The score at which a run ends, by either name; None: never."""
        return self.target_accuracy if self.target_score is None else self.target_score


@dataclass(frozen=True)
class EvalConfig:
    """Means over copies of an image, each validated at the cost of a validation."""

    view_average: bool = flag(False)
    """Validates the mean over the views of an image."""
    shift_average: int = integer(0, 0)
    """Validates the mean over the image as it is (with half of the weight), moved up and left, and moved down and
    right by so many pixels. 0: off."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    keep: int = integer(3, 2, 1_000_000, identity=False)
    """Latest checkpoints that are kept, beside the best one."""
    every_outer: int = integer(1, 1, identity=False)
    """Validations between two checkpoints; a new best is always saved."""
    every_sec: float = number(120.0, "[0, inf)", identity=False)
    """Seconds after a checkpoint until the next is written between two validations."""


@dataclass(frozen=True)
class LogConfig:
    """Records beside the run folder's own files."""

    tensorboard: bool = flag(True, identity=False)
    """Event files in WORKDIR/tensorboard."""
    wandb: bool = flag(False, identity=False)
    """Weights & Biases; offline, in WORKDIR/wandb, where there is no key or no network."""
    wandb_project: str = stated("largebatch", _is_project, PROJECTS, identity=False)
    """Project of Weights & Biases."""
    noise_every: int | str = integer("auto", 0, identity=False)
    """Steps from one measurement of the gradient's noise to the next; 0: never. `auto`: 1 on a CPU; elsewhere 10
    with batch.auto or adascale, which need it, and else 0."""


@dataclass(frozen=True)
class DevicesConfig:
    """Devices and hosts. Hosts find each other on TPU pods, Slurm, Open MPI and under largebatch.pod."""

    platform: str = one_of("auto", "cpu", "gpu", "tpu", identity=False)
    """Platform to run on."""
    coordinator_address: str | None = text(None, identity=False)
    """Address of host 0: HOST:PORT, HOST or :PORT. Where hosts do not find each other, give all three of these."""
    num_hosts: int | None = integer(None, 1, identity=False)
    """Number of hosts; 1 with no address: this host alone, whatever cluster is found."""
    host_index: int | None = integer(None, 0, identity=False)
    """Index of this host, from 0."""
    join_sec: float = number(300.0, "[1, 86400]", identity=False)
    """Seconds that hosts wait for each other at the start."""


@dataclass(frozen=True)
class Config:
    """The whole config of a run. Below build.py nothing has it: each part gets its section or plain values."""

    dataset: DatasetConfig = DatasetConfig()
    augment: AugmentConfig = AugmentConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sync: SyncConfig = SyncConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    devices: DevicesConfig = DevicesConfig()
    seed: int = integer(0, 0, LARGEST_SEED)
    """Seed of the parameters and of the order of examples."""

    def replace(self, **changes: object) -> "Config":
        """Return a copy with other fields: config.replace(batch={"size": 64}, seed=1)."""
        sections = {name: replace(getattr(self, name), **new) for name, new in changes.items() if name != "seed"}
        return replace(self, **{"seed": self.seed, **changes, **sections})

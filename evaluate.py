"""Evaluate a finished run on its validation or test split or on any images; write predictions or pictures.

    python evaluate.py runs/eurosat                                  the validation split, per class
    python evaluate.py runs/eurosat --split test --out test.csv
    python evaluate.py runs/NAME --split test --views --ema          the mean over views, by the moving average
    python evaluate.py runs/eurosat --images photos.zip --out photos.csv
    python evaluate.py runs/scenes --images photos --out maps        a run of masks or depths: a PNG of each
    python evaluate.py runs/theirs --config.dataset.path EuroSAT.zip   the data from here, not from its own path
    python evaluate.py runs/eurosat_model --images photos.zip        an export, as export.py writes it

It takes the checkpoint with the best validation score. Images given by --images count as labelled where the folder
they lie in is a class of the run, or, for masks, where there are images/ and masks/; all others are predicted only.
On several hosts run it on each: host 0 prints and writes, all read the images; or on one with --alone.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from absl import flags

import augment
import model as models
from largebatch import cli, terminal
from largebatch.buckets import bucket
from largebatch.config import rules
from largebatch.config.dicts import FIELDS, flatten
from largebatch.config.fields import Config
from largebatch.data.cache import Cache, DamagedCache, find_recorded
from largebatch.data.dataset import Dataset
from largebatch.data.decode import DecodeOptions
from largebatch.data.sharded_split import ShardedSplit, shard_split
from largebatch.data.sources.class_folders import find_images
from largebatch.data.sources.maps import find_maps
from largebatch.exports import files as export_files
from largebatch.hardware.chips import Hardware, auto_micro_batch_size
from largebatch.hosts import collectives, replicas
from largebatch.hosts.start import start_jax
from largebatch.predictions import tables
from largebatch.predictions.files import Predictions
from largebatch.runs import checkpoints, reader
from largebatch.runs.load import arrays_of, best_checkpoint
from largebatch.runs.summary import refuse_other_network
from largebatch.tasks.planes import PixelTargets
from largebatch.tasks.task import make_task
from largebatch.training.costs import training_costs
from largebatch.training.evaluation import SplitPredictions, make_predict, predict_split
from largebatch.training.loss import make_logits_fn
from largebatch.util import BadSetting, UserError
from plan import make_network

log = logging.getLogger("largebatch")

# Fields of a run's config that the command line may give instead, and how they are read.
OVERRIDES = {
    "dataset.path": flags.DEFINE_string,
    "dataset.split_file": flags.DEFINE_string,
    "augment.cache_dir": flags.DEFINE_string,
    "dataset.max_image_pixels": flags.DEFINE_integer,
}


def evaluate(
    run_folder: Path,
    split: str = "val",
    *,
    images: str | None = None,
    out: str | None = None,
    views: bool = False,
    shift: int = 0,
    ema: bool = False,
    overrides: dict[str, str | int] | None = None,
    alone: bool = False,
) -> float | None:
    """Print the results of a run; return the score if any image has a label. Collective.

    Args:
      split: of the run's own data, "val" or "test".
      images: an image, or a folder or zip of them, evaluated instead of the split.
      out: CSV file for the predictions; of maps a folder.
      views: logits are the mean over the run's views of an image.
      shift: logits are the mean over the image and copies moved by so many pixels; 0 takes the image alone.
      ema: use the moving average of the parameters.
      overrides: {field: value} for fields of OVERRIDES.
      alone: work on this host alone, whatever cluster it is part of.
    Raises:
      UserError: the run or the images cannot be used, or `out` not be written; on every host.
    """
    overrides = overrides or {}
    # Never in the folder that the run names: compiled programs are code.
    cli.use_compilation_cache(own_cache_dir(overrides))
    start_jax(num_hosts=1 if alone else None)
    options = json.dumps([split, images, out, views, shift, ema, overrides])
    if len(set(collectives.gather_text(options))) > 1:
        raise UserError("hosts disagree about the options; allowed: the same on each")
    run = load_run(run_folder, overrides)
    num_views = augment.VIEW_COUNTS[run.config.augment.views] if views else 1
    if views and num_views == 1:
        raise UserError(f"--views: {run.path} has augment.views 'none'; allowed: with more than one view")
    examples = shard_images(images, run) if images else shard_own_split(run, split, overrides)
    result = predict(run, examples, num_views=num_views, shift=shift, ema=ema, whole=bool(out))
    heading = f"{run_folder} at step {run.step}, {images or f'{split} split'}"
    heading += f", mean over {num_views} views" if views else ""
    heading += f", mean over shifts of {shift} px" if shift else ""
    heading += ", moving average of the parameters" if ema or (run.exported and run.description["ema"]) else ""
    print_and_write(examples.dataset, run.targets, result, heading, out)
    return result.scores.score if result.scores else None


def print_and_write(
    dataset: Dataset, targets: PixelTargets, result: SplitPredictions, heading: str, out: str | None
) -> None:
    """Print scores and write predictions on host 0, to which all hosts bring them part by part. Collective."""
    if targets.planes:
        parts = tables.map_parts(result)
        print_scores = partial(tables.print_map_results, len(dataset.ids), targets)
        write = partial(tables.write_maps, out, dataset, targets)
    else:
        predictions = Predictions(dataset.labels, result, dataset.ids)
        classes = np.concatenate([part.argmax(axis=1) for part in predictions.parts()])
        parts = predictions.parts()
        print_scores = partial(tables.print_results, dataset, classes)
        write = partial(tables.write_csv, out, dataset)

    def show(parts):
        print_scores(result.scores, heading)
        if out:
            write(parts)

    collectives.primary_takes(show, parts if out else iter(()))


def own_cache_dir(overrides: dict[str, str | int]) -> str:
    """Return the user's own cache folder, whatever the run says."""
    return overrides.get("augment.cache_dir") or FIELDS["augment.cache_dir"].default


# ---- a trained network -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The best checkpoint of a run, or an export of it.

    Attributes:
      path: the folder.
      config: config of the run, with the user's own limits and overrides.
      data: description of the training data; see `Cache.identity`.
      step: number of steps before the checkpoint.
      arrays: arrays of the state by name, on host 0; {} on the others.
      exported: True for an export, which has one set of parameters.
      description: checkpoint.json or model.json.
    """

    path: Path
    config: Config
    data: dict
    step: int
    arrays: dict[str, np.ndarray]
    exported: bool = False
    description: dict = dataclasses.field(default_factory=dict)

    @property
    def targets(self) -> PixelTargets:
        """Dense targets of the network; those of a classifier have no planes."""
        return PixelTargets.recorded_in(self.data)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that the network sees."""
        height, width, stored = self.data["image_shape"]
        return height, width, stored - self.targets.planes

    @property
    def scale(self) -> tuple[list[float], list[float]]:
        """Mean and deviation of the channels that the network sees."""
        channels = self.image_shape[-1]
        return self.data["mean"][:channels], self.data["std"][:channels]


def load_run(path: Path, overrides: dict[str, str | int] | None = None) -> TrainedRun:
    """Load a run on every host; the primary host reads it.

    Args:
      overrides: values in place of those of the config, by field.
    Raises:
      UserError: there is no run, or its checkpoints, files or config cannot be used; on every host.
    """
    exported = collectives.json_from_primary(export_files.is_export(path))
    read = export_files.read if exported else best_checkpoint
    best = collectives.agreed(lambda: read(path), collectives.is_primary()) or checkpoints.LoadedCheckpoint({}, {})
    about = collectives.json_from_primary(best.description)
    refuse_other_network(about["data"], models.NETWORK_VERSION, path)
    # The user's own limit: a run may come from someone else. How the batch changed is over; its file may be gone.
    own = {"dataset.max_image_pixels": FIELDS["dataset.max_image_pixels"].default}
    own |= {"batch.trace": None, "batch.per_device_batch_size": None, "batch.hold_last": False}
    try:
        config = rules.check(flatten(about["config"]) | own | (overrides or {}), models.MODELS)
    except UserError as error:
        raise UserError(f"{path}: its config cannot be read ({error})") from error
    return TrainedRun(path, config, about["data"], about["step"], best.arrays, exported, about)


def read_variables(run: TrainedRun, network, *, ema: bool) -> dict:
    """Return the variables of a run's network, on every host.

    Args:
      ema: take the moving average of the parameters.
    Raises:
      UserError: the run keeps no moving average, or its arrays are not those of the network.
    """
    if ema and run.exported:
        kept = "the moving average" if run.description["ema"] else "no moving average"
        raise UserError(f"--ema: {run.path} is an export of {kept}; allowed: with a run folder")
    params, model_state = jax.eval_shape(lambda: models.init_variables(network, run.image_shape, 0))
    expected = {"params": params, "model_state": model_state}
    expected = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), expected)
    if ema:
        expected = {"ema": expected}

    def fill():
        arrays = arrays_of(expected, run.arrays)
        if ema and not arrays:
            raise UserError(f"--ema: {run.path} keeps no moving average; train with --config.train.ema_decay")
        return checkpoints.fill(expected, arrays, str(run.path))

    state = collectives.from_primary(collectives.agreed(fill, collectives.is_primary()) or expected)
    state = state["ema"] if ema else state
    return {"params": state["params"], **state["model_state"]}


# ---- images and predictions -----------------------------------------------------------------------------


def shard_own_split(run: TrainedRun, split: str, overrides: dict[str, str | int]) -> ShardedSplit:
    """Shard a split of the run's own data over the devices. Collective.

    It comes from the user's own cache, else from the one that the run names, else it is decoded again into the
    user's own. A run may come from someone else: nothing is changed where it points, and reading there is logged.

    Raises:
      UserError: the digest of the example ids differs, so the split does.
    """
    own = own_cache_dir(overrides)
    for cache_dir in dict.fromkeys([own, run.config.augment.cache_dir]):
        if cache_dir != own:
            name_foreign(run.path, "augment.cache_dir", cache_dir)
        if (examples := shard_recorded(cache_dir, split, run.data)) is not None:
            return examples

    config = run.config.replace(augment={"cache_dir": own})
    for name in ("path", "split_file"):
        path = getattr(config.dataset, name)
        if path and f"dataset.{name}" not in overrides:
            name_foreign(run.path, f"dataset.{name}", path)

    def shard(cache: Cache) -> ShardedSplit:
        identity, source = cache.identity(), cache.manifest["source"]
        if identity["ids"] != run.data["ids"]:
            raise UserError(f"dataset: the examples of {source} are not those of the run")
        if identity["pixels"] != run.data["pixels"]:
            log.warning("dataset: the examples of %s have other pixels than those of the run had", source)
        return shard_split(cache.split(split), jax.device_count(), verify=True)

    return augment.with_cache(config, shard)


def shard_recorded(cache_dir: str, split: str, recorded: dict) -> ShardedSplit | None:
    """Shard a split of the data that a run recorded, from a cache in `cache_dir`, where nothing is changed.

    The result is None on every host if one of them has no such cache, or a damaged one. Collective.
    """
    examples = cache = None
    with contextlib.suppress(OSError, ValueError, BadSetting):  # nothing that this host can read
        cache = find_recorded(cache_dir, recorded)
    if "none" in collectives.gather_text("none" if cache is None else "found"):
        return None
    try:
        examples = shard_split(cache.split(split), jax.device_count(), verify=True)
    except DamagedCache as damage:
        log.warning("damaged cache: %s", damage)
    return None if "none" in collectives.gather_text("none" if examples is None else "sound") else examples


def name_foreign(run_folder: Path, field: str, path: str) -> None:
    """Log that a place outside the run folder is read only because the run's config names it."""
    if collectives.is_primary() and not reader.lies_in(path, run_folder):
        log.warning("reads %s %s, which %s names", field, path, run_folder)


def shard_images(path: str, run: TrainedRun) -> ShardedSplit:
    """Shard an image, or all of a folder or zip, in the size and with the channels of the run's. Collective.

    They are decoded block by block as they are predicted, unless all of them fit on the devices.

    Raises:
      UserError: a host cannot read them or finds other names, or their dtype is not the run's; on every host.
    """
    *size, channels = run.image_shape
    options = dataclasses.replace(DecodeOptions.from_config(run.config.dataset), size=tuple(size))

    def find() -> Dataset:
        if run.targets.planes:
            dataset = find_maps(path, run.targets, channels, options)
        else:
            of_run = dataclasses.replace(options, channels=channels)
            dataset = find_images(path, run.data["class_names"], of_run)
        if dataset.dtype != run.data["image_dtype"]:
            allowed = f"{run.data['image_dtype']}, as the images of {run.path}"
            raise UserError(f"--images: {dataset.ids[0]} is of {dataset.dtype}; allowed: {allowed}")
        return dataset

    dataset = collectives.agreed(find)
    if len(set(collectives.gather_text(hashlib.sha256("\n".join(dataset.ids).encode()).hexdigest()))) > 1:
        raise UserError(f"--images: hosts hold different images under {path}")
    return collectives.agreed(lambda: shard_split(dataset, jax.device_count()))


# ---- the predictions ---------------------------------------------------------------------------------


def predict(
    run: TrainedRun, examples: ShardedSplit, *, num_views: int, shift: int, ema: bool, whole: bool
) -> SplitPredictions:
    """Return scores of the labelled images and predictions of all, computed on all devices of all hosts.

    Args:
      whole: see `make_predict`.
    Raises:
      UserError: the shift is as large as an image; see `read_variables`.
    """
    image_shape, gives_maps = run.image_shape, run.targets.kind.of_pixels
    if shift and gives_maps:
        raise UserError(f"--shift: {shift}; allowed: 0 with maps")
    if shift >= min(image_shape[:2]):
        raise UserError(f"--shift: {shift}; allowed: below {min(image_shape[:2])}, the size of an image")
    hardware = Hardware.here()
    task = make_task(run.config.task, len(run.data["class_names"]), run.targets)
    network = make_network(run.config, task, hardware.platform)
    variables = read_variables(run, network, ema=ema)
    logits_fn = make_logits_fn(network, image_shape, *run.scale)
    if num_views > 1 or shift:
        logits_fn = augment.average_over_copies(logits_fn, num_views=num_views, shift=shift, gives_maps=gives_maps)
    micro_batch_size = auto_micro_batch_size(
        hardware, run.config.model.name, lambda: training_costs(network, image_shape).activation_bytes
    )
    program = make_predict(logits_fn, task, examples.dataset.image_shape, micro_batch_size, whole=whole)
    return predict_split(program, replicas.replicate(variables), examples, micro_batch_size, task)


def main() -> None:
    """Read the command line and evaluate.

    Raises:
      UsageError: the command line cannot be read.
      UserError: see `evaluate`.
    """
    terminal.log_to_stderr()
    flags.DEFINE_enum("split", "val", ["val", "test"], "Which split of the run's own data.")
    cli.path_flag("images", None, "An image, or a folder or zip of them, instead of a split.")
    cli.path_flag("out", None, "Write the predictions to this CSV file; of maps to this folder.")
    flags.DEFINE_bool("views", False, "Average the logits over the run's views of each image.")
    shift_help = "Average the logits over each image and copies moved by so many pixels."
    flags.DEFINE_integer("shift", 0, shift_help, lower_bound=0)
    flags.DEFINE_bool("ema", False, "Take the moving average of the parameters.")
    flags.DEFINE_bool("alone", False, cli.ALONE_HELP)
    for field, define in OVERRIDES.items():
        define(f"config.{field}", None, f"Instead of {field} in the run's config.")
    folders = cli.parse_plain_flags(sys.argv)
    if len(folders) != 1:
        raise cli.UsageError(f"give one run folder, or one of export.py; found {' '.join(folders) or 'none'}")
    given = flags.FLAGS
    if given.images and given["split"].present:
        raise cli.UsageError("--images and --split: allowed: one of them")
    overrides = {field: given[f"config.{field}"].value for field in OVERRIDES}
    evaluate(
        bucket.local_copy(folders[0]),
        given.split,
        images=given.images,
        out=given.out,
        views=given.views,
        shift=given.shift,
        ema=given.ema,
        overrides={field: value for field, value in overrides.items() if value is not None},
        alone=given.alone,
    )


if __name__ == "__main__":
    cli.exit_after(main)

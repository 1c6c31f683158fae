"""A finished run on validation, test or any folder of images; predictions as a file.

    python evaluate.py runs/eurosat                                  the validation split, per class
    python evaluate.py runs/eurosat --split test --out test.csv
    python evaluate.py runs/eurosat --split test --views --ema       another accuracy, never the plain one
    python evaluate.py runs/eurosat --images photos.zip --out photos.csv
    python evaluate.py runs/theirs --config.dataset.path EuroSAT.zip   the data from here, not from where it says

Takes the checkpoint with the best validation accuracy. Images given by --images count as labelled where
the folder they lie in is a class of the run; all others are predicted only. On several hosts run it on
each; host 0 reads the run folder, prints and writes, and all of them read the images.
"""

import csv
import hashlib
import json
import logging
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_dict
from rich import box, console, table, text

import augment
import model as models
from configs import default
from experiment import make_network, resolve_micro_batch_size
from largebatch import cli, files, terminal
from largebatch.config.validate import validate
from largebatch.data import images, sources
from largebatch.data.cache import Cache, DamagedCache, open_cache
from largebatch.errors import UserError, printable
from largebatch.hosts import collectives, memory, replicas
from largebatch.hosts.start import start_jax
from largebatch.runs import checkpoints, reader
from largebatch.runs.progress import arrays_of, best_checkpoint
from largebatch.training.evaluation import in_split_order, make_predict, rows_of_device, score
from largebatch.training.loss import make_logits_fn

log = logging.getLogger("largebatch")

# Fields of a run's config that the command line may give instead, and how they are read.
OVERRIDES = {
    "dataset.path": flags.DEFINE_string,
    "augment.cache_dir": flags.DEFINE_string,
    "dataset.max_image_pixels": flags.DEFINE_integer,
}


def load_run(
    run: Path, overrides: dict[str, str | int] | None = None
) -> tuple[config_dict.ConfigDict, dict, dict, int]:
    """Config, description of the data, arrays and step of a run's best checkpoint.

    Read by the primary host; the others get all but the arrays, for which they have {}. `overrides` take the place
    of fields of the config.

    Raises:
      UserError: no such run, or its checkpoints or config cannot be used; on every host.
    """
    found = collectives.agreed(lambda: best_checkpoint(run), collectives.is_primary())
    arrays, description = found or ({}, None)
    description = json.loads(collectives.gather_text(json.dumps(description))[0])
    config = default.get_config()
    with config.unlocked():
        config.update(config_dict.ConfigDict(description["config"]))
    # How the batch changed is over, and its file may be gone.
    config.batch.update({"trace": None, "per_device_batch_size": None, "hold_last": False})
    # The user's own limit: a run may come from someone else.
    config.dataset.max_image_pixels = default.get_config().dataset.max_image_pixels
    config.update_from_flattened_dict(overrides or {})
    validate(config, models.OPTIONS)
    return config, description["data"], arrays, description["step"]


def read_split(run: Path, config, split: str, recorded: dict, overrides: dict[str, str | int]) -> images.Dataset:
    """Images and labels of a split of the run's data, `recorded` in its checkpoint.

    Read from the user's own cache, else from the one that the run names, else decoded again into the user's own. A
    run may come from someone else: nothing is changed where it points, and what is read there is named.

    Raises:
      UserError: the digest of the example ids is another, so the split is another.
    """
    own_cache_dir = overrides.get("augment.cache_dir") or default.get_config().augment.cache_dir
    dataset = find_cached(own_cache_dir, split, recorded)
    if dataset is None and config.augment.cache_dir != own_cache_dir:
        name_foreign(run, "augment.cache_dir", config.augment.cache_dir)
        dataset = find_cached(config.augment.cache_dir, split, recorded)
    if dataset is not None:
        return dataset
    config.augment.cache_dir = own_cache_dir
    if config.dataset.path and "dataset.path" not in overrides:
        name_foreign(run, "dataset.path", config.dataset.path)

    def read(cache):
        dataset = read_cache(cache, split)
        if cache.identity()["ids"] != recorded["ids"]:
            raise UserError(f"dataset: the examples of {cache.manifest['source']} are not those of the run")
        return dataset

    return augment.with_cache(config, read)[1]


def name_foreign(run: Path, field: str, path: str) -> None:
    """Says that a place outside the run folder is read for no other reason than that the run's config names it."""
    if collectives.is_primary() and not reader.lies_in(path, run):
        log.warning("reads %s %s, which %s names", field, path, run)


def find_cached(cache_dir: str, split: str, recorded: dict) -> images.Dataset | None:
    """The split where a sound cache of just these data is in `cache_dir` on every host; changes nothing there."""

    dataset = None
    try:
        for manifest in sorted(epath.Path(cache_dir).expanduser().glob("[!.]*/manifest.json")):
            if cache := open_if_of(manifest.parent, recorded):
                dataset = read_cache(cache, split)
                break
    except DamagedCache as damage:
        log.warning("damaged cache: %s", damage)
    except (OSError, ValueError, ImportError):  # nothing there that this host can read; a path that is none
        pass
    everywhere = all(map(json.loads, collectives.gather_text(json.dumps(dataset is not None))))
    return dataset if everywhere else None


def open_if_of(folder: epath.Path, recorded: dict) -> Cache | None:
    """A cache folder that holds just the data of `recorded`."""
    try:
        cache = open_cache(folder)
    except DamagedCache:  # of some data set; who needs it will say so
        return None
    identity = cache.identity()
    return cache if identity == {name: recorded.get(name) for name in identity} else None


def read_cache(cache: Cache, split: str) -> images.Dataset:
    """Images and labels of a split; raises DamagedCache."""
    pixels = memory.aligned_empty((cache.count(split), *cache.image_shape), np.uint8)
    cache.read_images(split, np.arange(len(pixels)), pixels.reshape(len(pixels), -1))
    labels, ids = cache.small_array(f"{split}_labels"), cache.small_array(f"{split}_ids")
    return images.Dataset(pixels, labels, cache.class_names, ids.tolist())


def read_images(path: str, class_names: list[str], size: int, max_pixels: int) -> images.Dataset:
    """All images in a folder or zip, resized to `size`, on every host; see `data.find_images`.

    Raises:
      UserError: a host cannot read them, or not the same ones; on every host.
    """
    dataset = collectives.agreed(lambda: sources.find_images(path, class_names, size, max_pixels))
    digest = hashlib.sha256(dataset.images)
    digest.update("\n".join(dataset.example_ids).encode())
    if len(set(collectives.gather_text(digest.hexdigest()))) > 1:
        raise UserError(f"--images: hosts hold different images under {path}")
    return dataset


def read_variables(network, image_shape, arrays: dict, run: Path, *, ema: bool) -> dict:
    """What the network is applied to, from the arrays of a checkpoint; on every host.

    Raises:
      UserError: the run keeps no moving average, or its arrays are not those of the network.
    """
    params, model_state = jax.eval_shape(lambda: models.init_variables(network, image_shape, 0))
    like = {"params": params, "model_state": model_state}
    like = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), {"ema": like} if ema else like)

    def read():
        found = arrays_of(like, arrays)
        if ema and not found:
            raise UserError(f"--ema: {run} keeps no moving average; train with --config.train.ema_decay")
        return checkpoints.fill(like, found, str(run))

    found = collectives.from_primary(collectives.agreed(read, collectives.is_primary()) or like)
    found = found["ema"] if ema else found
    return {"params": found["params"], **found["model_state"]}


def predict(logits_fn, variables, dataset: images.Dataset) -> np.ndarray:
    """Logits [N, num_classes] of all images, computed on all devices of all hosts, on every host."""
    rows = dataset.images.reshape(len(dataset.images), -1)
    placed = []
    for index, device in zip(replicas.local_indices(), jax.local_devices(), strict=True):
        own = rows[rows_of_device(len(rows), jax.device_count(), index)]
        placed.append(jax.device_put(own[None], device))
    run = make_predict(logits_fn, resolve_micro_batch_size("auto"))
    gathered = np.asarray(run(replicas.replicate(variables), replicas.stack(placed)))
    return in_split_order(gathered, len(rows))


def print_results(dataset: images.Dataset, logits: np.ndarray, what: str) -> None:
    """Accuracy and loss over the labelled images, and a line per class."""
    out, known = console.Console(highlight=False), dataset.labels >= 0
    out.print(printable(what), markup=False, soft_wrap=True)
    predicted, names = logits.argmax(axis=1), [printable(name) for name in dataset.class_names]
    if not known.any():
        counts = np.bincount(predicted, minlength=len(names))
        found = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count)
        out.print(f"{len(predicted):,} images without labels; predicted {found}", markup=False, soft_wrap=True)
        return
    labels, hits = dataset.labels[known], predicted[known]
    scores = score(logits[known], labels)
    rows = table.Table(box=box.SIMPLE)
    rows.add_column("class")
    for name in ("images", "recall", "precision", "most often taken for"):
        rows.add_column(name, justify="left" if " " in name else "right")
    for label, name in enumerate(names):
        own, called = labels == label, hits == label
        wrong = np.bincount(hits[own & ~called], minlength=len(names))
        taken = f"{names[wrong.argmax()]} ({wrong.max()})" if wrong.any() else ""
        recall, precision = (_share(part, own & called) for part in (own, called))
        rows.add_row(text.Text(name), f"{own.sum():,}", recall, precision, text.Text(taken))
    out.print(rows)
    out.print(f"accuracy {scores.accuracy:.4f}, loss {scores.loss:.4f} over {scores.num_examples:,} images")
    if not known.all():
        out.print(f"{np.count_nonzero(~known):,} more images lie in no folder named as a class: predicted only")


def _share(whole: np.ndarray, part: np.ndarray) -> str:
    return f"{part.sum() / whole.sum():.4f}" if whole.any() else "none"


def write_csv(path: str, dataset: images.Dataset, logits: np.ndarray) -> None:
    """One line per image: id, label (empty where unknown), prediction, and the probability of each class."""
    logits = logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    names = dataset.class_names
    try:
        with files.replacing(Path(path)) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "label", "prediction", *(f"p({name})" for name in names)])
            for example, label, row in zip(dataset.example_ids, dataset.labels, probabilities, strict=True):
                known = names[label] if label >= 0 else ""
                writer.writerow([example, known, names[row.argmax()], *(f"{p:.6f}" for p in row)])
    except OSError as error:
        raise UserError(f"--out: cannot write {path} ({error.strerror or error})") from error


def evaluate(
    run: Path,
    split: str,
    path: str | None,
    out: str | None,
    *,
    views: bool = False,
    ema: bool = False,
    overrides: dict[str, str | int] | None = None,
) -> float | None:
    """Prints the results of a run on a split, or on the images in `path`; returns the accuracy if there is one.

    With `views` logits are the mean over the 8 views of an image, with `ema` parameters their moving average.
    `overrides` {field: value} are for those of OVERRIDES.

    Every host calls it; the primary host prints and writes.

    Raises:
      UserError: the run or the images cannot be used, or `out` not be written; on every host.
    """
    overrides = overrides or {}
    # Never where the run says: programs are code.
    cli.use_compilation_cache(overrides.get("augment.cache_dir", default.get_config().augment.cache_dir))
    start_jax()
    asked = json.dumps([split, path, views, ema, overrides])
    if len(set(collectives.gather_text(asked))) > 1:
        raise UserError("hosts disagree about the options; allowed: the same on each")
    config, description, arrays, step = load_run(run, overrides)
    if path:
        size, max_pixels = description["image_shape"][0], config.dataset.max_image_pixels
        dataset = read_images(path, description["class_names"], size, max_pixels)
    else:
        dataset = read_split(run, config, split, description, overrides)
    shape = dataset.images.shape[1:]
    network = make_network(config, len(dataset.class_names))
    variables = read_variables(network, shape, arrays, run, ema=ema)
    logits_fn = make_logits_fn(network, shape, description["mean"], description["std"])
    if views:
        logits_fn = augment.average_over_views(logits_fn, shape)
    logits = predict(logits_fn, variables, dataset)
    how = ", mean over 8 views" * views + ", moving average of the parameters" * ema

    def show():
        print_results(dataset, logits, f"{run} at update {step}, {path or f'{split} split'}{how}")
        if out:
            write_csv(out, dataset, logits)

    collectives.agreed(show, collectives.is_primary())
    known = dataset.labels >= 0
    return score(logits[known], dataset.labels[known]).accuracy if known.any() else None


def main() -> None:
    """Reads the command line and evaluates.

    Raises:
      UsageError: the command line cannot be read.
      UserError: see `evaluate`.
    """
    terminal.log_to_stderr()
    flags.DEFINE_enum("split", "val", ["val", "test"], "Which split of the run's own data.")
    flags.DEFINE_string("images", None, "A folder or zip of images instead of a split.")
    flags.DEFINE_string("out", None, "Write the predictions to this CSV file.")
    flags.DEFINE_bool("views", False, "Average the logits over the 8 views of each image.")
    flags.DEFINE_bool("ema", False, "Take the moving average of the parameters.")
    for field, define in OVERRIDES.items():
        define(f"config.{field}", None, f"Instead of {field} in the run's config.")
    given = cli.parse_plain_flags(sys.argv)
    if len(given) != 1:
        raise cli.UsageError(f"give one run folder; found {' '.join(given) or 'none'}")
    if flags.FLAGS.images and flags.FLAGS["split"].present:
        raise cli.UsageError("--images and --split: allowed: one of them")
    how = {"views": flags.FLAGS.views, "ema": flags.FLAGS.ema}
    values = {field: flags.FLAGS[f"config.{field}"].value for field in OVERRIDES}
    overrides = {field: value for field, value in values.items() if value is not None}
    run = Path(given[0]).expanduser()
    evaluate(run, flags.FLAGS.split, flags.FLAGS.images, flags.FLAGS.out, overrides=overrides, **how)


if __name__ == "__main__":
    cli.exit_after(main)

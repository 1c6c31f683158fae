"""A finished run on validation, test or any folder of images; predictions as a file.

    python evaluate.py runs/eurosat                                  the validation split, per class
    python evaluate.py runs/eurosat --split test --out test.csv
    python evaluate.py runs/eurosat --images photos.zip --out photos.csv

Takes the checkpoint with the best validation accuracy. Images given by --images count as labelled where
the folder they lie in is a class of the run; all others are predicted only.
"""

import csv
import logging
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import config_dict
from rich import box, console, table

import augment
import model as models
import train
from configs import default
from largebatch import UserError, checkpoints, data, devices, evaluation, images, resume
from largebatch import config as configs


def load_run(run: Path) -> tuple[config_dict.ConfigDict, dict, dict, int]:
    """Config, description of the data, parameters and step of a run's best checkpoint.

    Raises:
      UserError: no such run, or its checkpoints or config cannot be used.
    """
    arrays, description = resume.best_checkpoint(run)
    config = default.get_config()
    with config.unlocked():
        config.update(config_dict.ConfigDict(description["config"]))
    configs.validate(config)
    return config, description["data"], resume.params_in(arrays), description["step"]


def read_split(config, split: str, expected: str) -> images.Dataset:
    """Images and labels of a split from the run's cache, built again if it is gone.

    Raises:
      UserError: the digest of the example ids is not `expected`, so the split is another.
    """

    def read(cache):
        pixels = devices.aligned_empty((cache.count(split), *cache.image_shape), np.uint8)
        cache.read_images(split, np.arange(len(pixels)), pixels.reshape(len(pixels), -1))
        if cache.identity()["ids"] != expected:
            raise UserError(f"dataset: the examples of {cache.manifest['source']} are not those of the run")
        labels, ids = cache.small_array(f"{split}_labels"), cache.small_array(f"{split}_ids")
        return images.Dataset(pixels, labels, cache.class_names, ids.tolist())

    return augment.with_cache(config, read)[1]


def predict(network, params, dataset: images.Dataset, mean, std) -> np.ndarray:
    """Logits [N, num_classes] of all images, computed on all devices of this host."""
    shape = dataset.images.shape[1:]
    rows = dataset.images.reshape(len(dataset.images), -1)
    num_devices, placed = jax.local_device_count(), []
    for index, device in enumerate(jax.local_devices()):
        own = rows[evaluation.rows_of_device(len(rows), num_devices, index)]
        placed.append(jax.device_put(own[None], device))
    size = train.resolve_micro_batch_size("auto", jax.default_backend())
    run = evaluation.make_predict(models.make_logits_fn(network, shape, mean, std), size)
    gathered = np.asarray(run(devices.replicate(params), devices.stack(placed)))
    return evaluation.in_split_order(gathered, len(rows))


def print_results(dataset: images.Dataset, logits: np.ndarray, what: str) -> None:
    """Accuracy and loss over the labelled images, and a line per class."""
    out, known = console.Console(highlight=False), dataset.labels >= 0
    out.print(what, markup=False, soft_wrap=True)
    predicted, names = logits.argmax(axis=1), dataset.class_names
    if not known.any():
        counts = np.bincount(predicted, minlength=len(names))
        found = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count)
        out.print(f"{len(predicted):,} images without labels; predicted {found}", markup=False, soft_wrap=True)
        return
    labels, hits = dataset.labels[known], predicted[known]
    scores = evaluation.score(logits[known], labels)
    rows = table.Table(box=box.SIMPLE)
    rows.add_column("class")
    for name in ("images", "recall", "precision", "most often taken for"):
        rows.add_column(name, justify="left" if " " in name else "right")
    for label, name in enumerate(names):
        own, called = labels == label, hits == label
        wrong = np.bincount(hits[own & ~called], minlength=len(names))
        taken = f"{names[wrong.argmax()]} ({wrong.max()})" if wrong.any() else ""
        recall, precision = (_share(part, own & called) for part in (own, called))
        rows.add_row(name, f"{own.sum():,}", recall, precision, taken)
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
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    try:
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "label", "prediction", *(f"p({name})" for name in names)])
            for example, label, row in zip(dataset.example_ids, dataset.labels, probabilities, strict=True):
                known = names[label] if label >= 0 else ""
                writer.writerow([example, known, names[row.argmax()], *(f"{p:.6f}" for p in row)])
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"--out: cannot write {path} ({error.strerror})") from error


def evaluate(run: Path, split: str, path: str | None, out: str | None) -> float | None:
    """Prints the results of a run on a split, or on the images in `path`; returns the accuracy if there is one.

    Raises:
      UserError: the run or the images cannot be used.
    """
    config, description, params, step = load_run(run)
    configs.use_compilation_cache(config.augment.cache_dir)
    devices.start()
    if path:
        size = description["image_shape"][0]
        dataset = data.find_images(path, description["class_names"], size)
    else:
        dataset = read_split(config, split, description["ids"])
    conv = models.resolve_conv(config.model.conv, jax.default_backend())
    network = models.create_model(config.model.name, len(dataset.class_names), config.model.dtype, conv)
    params = checkpoints.fill(
        jax.eval_shape(lambda: models.init_params(network, dataset.images.shape[1:], 0)), params, str(run)
    )
    logits = predict(network, params, dataset, description["mean"], description["std"])
    print_results(dataset, logits, f"{run} at update {step}, {path or f'{split} split'}")
    if out:
        write_csv(out, dataset, logits)
    known = dataset.labels >= 0
    return evaluation.score(logits[known], dataset.labels[known]).accuracy if known.any() else None


def main() -> int:
    """Reads the command line; returns the exit code."""
    logging.basicConfig(format="%(message)s")
    flags.DEFINE_enum("split", "val", ["val", "test"], "Which split of the run's own data.")
    flags.DEFINE_string("images", None, "A folder or zip of images instead of a split.")
    flags.DEFINE_string("out", None, "Write the predictions to this CSV file.")
    try:
        given = configs.parse_plain_flags(sys.argv)
        if len(given) != 1:
            raise configs.UsageError(f"give one run folder; found {' '.join(given) or 'none'}")
        if flags.FLAGS.images and flags.FLAGS["split"].present:
            raise configs.UsageError("--images and --split: allowed: one of them")
    except configs.UsageError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return configs.EXIT_USAGE
    try:
        evaluate(Path(given[0]).expanduser(), flags.FLAGS.split, flags.FLAGS.images, flags.FLAGS.out)
    except UserError as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        return configs.EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

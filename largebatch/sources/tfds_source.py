"""Sets that TFDS has prepared, read without TensorFlow."""

import contextlib
import logging
import os

import numpy as np
from etils import epath

from largebatch.decoding import images
from largebatch.sources.source import Source
from largebatch.sources.split import split_named
from largebatch.util import UserError, expanded, iterate_batches, num_bytes

log = logging.getLogger("largebatch")

ROWS_AT_ONCE = 256  # reading blocks takes half the time of single rows


def prepared_builder(name: str, data_dir: str | None):
    """Return the TFDS builder of a prepared set, or None. TensorFlow is not needed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow_datasets as tfds

    data_dir = epath.Path(expanded(tfds_dir(data_dir), "dataset.path"))
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"dataset.name: TFDS cannot open {name!r} ({' '.join(str(error).split())})") from error


def tfds_dir(data_dir: str | None) -> str:
    """Return the TFDS directory, to be passed explicitly: TFDS reads TFDS_DATA_DIR only when it is imported."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def is_readable(builder) -> bool:
    """Return True for array_record: TFDS 4.9.10 needs TensorFlow for tfrecord and loses examples in parquet."""
    return builder.info.file_format is not None and builder.info.file_format.value == "array_record"


def tfds_source(
    name: str, data_dir: str | None, split: str | None, options: images.DecodeOptions, max_pixels: int
) -> Source:
    """Create the source of a prepared TFDS set.

    Args:
      split: TFDS split, as "train+test", to be split by us; None takes the published splits.
    Raises:
      UserError: the set is not prepared, not readable here, has other features, or no such split.
    """
    builder = _readable_builder(name, data_dir)
    class_names = list(builder.info.features["label"].names)
    published = _published_splits(builder, name) if split is None else {}
    split = split or "+".join(published)
    rows = _open_split(builder, split)
    splits = None
    if len(published) > 1:
        sizes = [builder.info.splits[theirs].num_examples for theirs in published]
        splits = np.repeat(list(published.values()), sizes).tolist()
    ids, labels = _list_rows(rows, name, split, class_names)
    if splits:
        ids = [f"{ours}/{example_id}" for ours, example_id in zip(splits, ids, strict=True)]

    @contextlib.contextmanager
    def open_pixels():
        limits = images.Limits(max_pixels)

        def read(indices, out=None) -> list[np.ndarray]:
            decoded = []
            for index, row in zip(indices, _read_rows(rows, indices, name), strict=True):
                image = row["image"]
                file = images.ImageFile(ids[index], labels[index], len(image), lambda image=image: image)
                decoded.append(images.decode(file, options, limits))
            return decoded

        with images.pillow_limited_to(max_pixels):
            yield read

    info, what = builder.info, f"published {split}" if splits else split
    return Source(
        description=f"TFDS {info.full_name} [{split}]",
        fingerprint=f"tfds {info.full_name} {_sizes(builder)} {what} {len(rows)} {options}",
        ids=ids,
        labels=np.array(labels, np.int32),
        class_names=class_names,
        open=open_pixels,
        splits=splits,
    )


def _published_splits(builder, name: str) -> dict[str, str]:
    """Return the TFDS splits that are published for training, validation or test, with the names of SPLITS.

    A set of one split is all training. Splits of other names, and those without labels, are left out; if only train
    remains, the set publishes no split.
    """
    sizes = {theirs: info.num_examples for theirs, info in builder.info.splits.items() if info.num_examples}
    published = {theirs: split_named(theirs) for theirs in sizes if split_named(theirs)}
    if len(sizes) == 1:
        return dict.fromkeys(sizes, "train")
    if "train" not in published.values() or len(set(published.values())) < len(published):
        raise UserError(
            f"dataset.tfds_split: None, and TFDS set {name!r} has the splits {', '.join(sizes)}; allowed: those to "
            "read, as 'train+test', where there is no train or two for one of train, val, test"
        )
    for theirs in [theirs for theirs, ours in published.items() if ours != "train"]:
        (first,) = _read_rows(_open_split(builder, theirs), [0], name)
        if int(first["label"]) < 0:  # as in the test split of ImageNet, whose labels are not published
            del published[theirs]
    left_out = [f"{theirs} ({size} images)" for theirs, size in sizes.items() if theirs not in published]
    if left_out:
        log.warning("TFDS set %s: left out the splits %s; dataset.tfds_split reads them", name, ", ".join(left_out))
    return published


def _readable_builder(name: str, data_dir: str | None):
    import tensorflow_datasets as tfds

    where = tfds_dir(data_dir)
    prepare = (
        'to prepare it: pip install tensorflow importlib_resources, then python -c "import '
        f"tensorflow_datasets as tfds; tfds.builder('{name}', data_dir='{where}', "
        "file_format='array_record').download_and_prepare()\"; or give your own images by dataset.path"
    )
    builder = prepared_builder(name, data_dir)
    if builder is None:
        raise UserError(f"dataset.name: TFDS set {name!r} is not prepared in {where}; {prepare}")
    info = builder.info
    if not is_readable(builder):
        file_format = info.file_format and info.file_format.value
        raise UserError(
            f"dataset.name: TFDS set {name!r} is prepared as {file_format}, not array_record; {prepare}"
        )
    if not {"image", "label"} <= info.features.keys():
        features = ", ".join(info.features)
        raise UserError(
            f"dataset.name: TFDS set {name!r} has features {features}; allowed: sets with image and label"
        )
    for feature, kind in (("image", tfds.features.Image), ("label", tfds.features.ClassLabel)):
        if not isinstance(found := info.features[feature], kind):
            raise UserError(
                f"dataset.name: TFDS set {name!r} has {feature} as {type(found).__name__}; allowed: {kind.__name__}"
            )
    return builder


def _sizes(builder) -> list[tuple[str, int]]:
    """Return name and bytes of each file, which are equal in all copies of a set, unlike times and places."""
    return sorted((path.name, num_bytes(path)) for path in epath.Path(builder.data_dir).iterdir())


def _open_split(builder, split: str):
    """Open the rows of a split for random access, with images still encoded."""
    import tensorflow_datasets as tfds

    try:
        return builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})
    except ValueError as error:
        raise UserError(f"dataset.tfds_split: {split!r}: {' '.join(str(error).split())}") from error


def _read_rows(rows, indices, name: str) -> list[dict]:
    try:
        return rows.__getitems__(list(indices))
    except RuntimeError as error:
        raise UserError(f"dataset.path: TFDS set {name!r} is damaged ({error})") from error


def _list_rows(rows, name: str, split: str, class_names: list[str]) -> tuple[list[str], list[int]]:
    """Return ids and labels of all rows. TFDS stores them beside the images, so all of the set is read once."""
    ids, labels = [], []
    for part in iterate_batches(len(rows), ROWS_AT_ONCE):
        for number, row in enumerate(_read_rows(rows, range(part.start, part.stop), name), part.start):
            label = int(row["label"])
            if label < 0:
                raise UserError(
                    f"dataset.tfds_split: {split!r} of TFDS set {name!r} has rows without label; allowed: "
                    "splits that have labels, as 'train'"
                )
            file = row.get("filename", f"{number:09d}")
            file = file.decode() if isinstance(file, bytes) else str(file)
            ids.append(file if "/" in file else f"{class_names[label]}/{file}")
            labels.append(label)
    return ids, labels

"""Sets that TFDS has prepared, read without TensorFlow."""

import logging
import os
from collections.abc import Sequence

import numpy as np
from etils import epath

from largebatch.data.dataset import Dataset, dataset_of_files
from largebatch.data.decode import DecodeOptions, decode
from largebatch.data.sources.splits import split_named
from largebatch.util import UserError, expanded, iterate_batches

log = logging.getLogger("largebatch")

FORMAT = "array_record"  # TFDS 4.9.10 needs TensorFlow for tfrecord, and loses examples in parquet
ROWS_AT_ONCE = 256  # reading blocks takes half the time of single rows


def tfds_dir(data_dir: str | None) -> str:
    """Return the TFDS directory, to be passed explicitly: TFDS reads TFDS_DATA_DIR only when it is imported."""
    return data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"


def prepared_builder(name: str, data_dir: str | None):
    """Return the TFDS builder of a prepared set, or None. TensorFlow is not needed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow_datasets as tfds

    data_dir = epath.Path(expanded(tfds_dir(data_dir), "dataset.path"))
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        return None
    except Exception as error:  # damaged descriptions end in errors of protobuf, json and others
        raise UserError(f"dataset.name: TFDS cannot open {name!r} ({' '.join(str(error).split())})") from error


def file_format(builder) -> str | None:
    """Return the format of a set's files; None if it is not known."""
    return getattr(builder.info.file_format, "value", None)


def tfds_dataset(name: str, data_dir: str | None, split: str | None, options: DecodeOptions) -> Dataset:
    """Return the data set of a prepared TFDS set.

    Labels are a ClassLabel, or whole numbers or texts, which are the names of the classes.

    Args:
      split: TFDS split, as "train+test", to be split by us; None takes the published splits.
    Raises:
      UserError: the set is not prepared, not readable here, has other features, or no such split.
    """
    builder = _readable_builder(name, data_dir)
    published = _published_splits(builder) if split is None else {}
    split = split or "+".join(published)
    rows = _open_split(builder, split)
    features = [feature for feature in ("label", "filename") if feature in builder.info.features]
    labels, files = [], []
    for part in iterate_batches(len(rows), ROWS_AT_ONCE):
        for number, row in enumerate(_read(builder, rows, range(part.start, part.stop), features), part.start):
            labels.append(_plain(row["label"]))
            files.append(str(_plain(row.get("filename", f"{number:09d}"))))
    if any(isinstance(label, int) and label < 0 for label in labels):
        found = f"{split!r} of TFDS set {name!r} has rows without label"
        raise UserError(f"dataset.tfds_split: {found}; allowed: splits that have labels, as 'train'")
    class_names = getattr(builder.info.features["label"], "names", None)  # of a ClassLabel
    if class_names is None:
        number_of = {value: number for number, value in enumerate(sorted(set(labels)))}
        class_names, labels = list(map(str, number_of)), [number_of[label] for label in labels]
    ids = [file if "/" in file else f"{class_names[i]}/{file}" for i, file in zip(labels, files, strict=True)]
    splits = None
    if len(published) > 1:
        sizes = [builder.info.splits[theirs].num_examples for theirs in published]
        splits = np.repeat(list(published.values()), sizes).tolist()
        ids = [f"{ours}/{example_id}" for ours, example_id in zip(splits, ids, strict=True)]

    def decode_examples(examples: Sequence[int]) -> list[np.ndarray]:
        read = zip(examples, _read(builder, rows, examples, ["image"]), strict=True)
        return [decode(ids[example], row["image"], options) for example, row in read]

    description = f"TFDS {builder.info.full_name} [{split}]"
    return dataset_of_files(description, ids, labels, list(class_names), decode_examples, splits=splits)


def _open_split(builder, split: str):
    """Return the encoded rows of a TFDS split."""
    import tensorflow_datasets as tfds

    try:
        return builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    except ValueError as error:
        raise UserError(f"dataset.tfds_split: {split!r}: {' '.join(str(error).split())}") from error


def _read(builder, rows, indices, features: list[str]) -> list[dict]:
    """Decode some features of some rows; images stay encoded."""
    import tensorflow_datasets as tfds

    chosen = tfds.features.FeaturesDict({name: builder.info.features[name] for name in features})
    decoders = {"image": tfds.decode.SkipDecoding()} if "image" in features else None
    try:
        records = rows.__getitems__(list(indices))
    except RuntimeError as error:
        raise UserError(f"dataset.path: TFDS set {builder.info.name!r} is damaged ({error})") from error
    return [chosen.deserialize_example_np(record, decoders=decoders) for record in records]


def _plain(value) -> int | str:
    """Return a label or a file name as TFDS gives it, which may be bytes or a NumPy scalar."""
    return value.decode() if isinstance(value, bytes) else value if isinstance(value, str) else int(value)


def _published_splits(builder) -> dict[str, str]:
    """Return the TFDS splits that are published for training, validation or test, with the names of SPLITS.

    A set of one split is all training. Splits of other names, and those without labels, are left out; if only train
    remains, the set publishes no split.
    """
    name = builder.info.name
    sizes = {theirs: info.num_examples for theirs, info in builder.info.splits.items() if info.num_examples}
    published = {theirs: split_named(theirs) for theirs in sizes if split_named(theirs)}
    if len(sizes) == 1:
        return dict.fromkeys(sizes, "train")
    if "train" not in published.values() or len(set(published.values())) < len(published):
        found = f"None, and TFDS set {name!r} has the splits {', '.join(sizes)}"
        allowed = "those to read, as 'train+test', where there is no train or two for one of train, val, test"
        raise UserError(f"dataset.tfds_split: {found}; allowed: {allowed}")
    for theirs in [theirs for theirs, ours in published.items() if ours != "train"]:
        (first,) = _read(builder, _open_split(builder, theirs), [0], ["label"])
        if _plain(first["label"]) == -1:  # as in the test split of ImageNet, whose labels are not published
            del published[theirs]
    left_out = [f"{theirs} ({size} images)" for theirs, size in sizes.items() if theirs not in published]
    if left_out:
        log.warning("TFDS set %s: left out the splits %s; dataset.tfds_split reads them", name, ", ".join(left_out))
    return published


def _readable_builder(name: str, data_dir: str | None):
    """Return the builder of a set with images and labels; raise UserError for any other."""
    import tensorflow_datasets as tfds

    where = tfds_dir(data_dir)
    prepare = (
        'to prepare it: pip install tensorflow importlib_resources, then python -c "import '
        f"tensorflow_datasets as tfds; tfds.builder('{name}', data_dir='{where}', "
        f"file_format='{FORMAT}').download_and_prepare()\"; or give your own images by dataset.path"
    )
    builder, of_set = prepared_builder(name, data_dir), f"dataset.name: TFDS set {name!r}"
    if builder is None:
        raise UserError(f"{of_set} is not prepared in {where}; {prepare}")
    if file_format(builder) != FORMAT:
        raise UserError(f"{of_set} is prepared as {file_format(builder)}, not {FORMAT}; {prepare}")
    features = dict(builder.info.features.items())
    image, label = features.get("image"), features.get("label")
    is_number = label is not None and label.shape == () and np.issubdtype(label.np_dtype, np.integer)
    if not isinstance(image, tfds.features.Image) or not (is_number or isinstance(label, tfds.features.Text)):
        found = ", ".join(f"{feature} ({type(kind).__name__})" for feature, kind in features.items())
        allowed = "image (Image) and label (ClassLabel, whole numbers or Text)"
        raise UserError(f"{of_set} has the features {found}; allowed: sets with {allowed}")
    return builder

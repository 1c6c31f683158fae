"""Images in class folders, and their splits where a set is published in splits.

Class/image.jpg          folders around all classes are ignored
train/Class/image.jpg    beside val/Class/image.jpg, test/Class/image.jpg, or both
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from posixpath import basename, dirname

import numpy as np

from largebatch.data.dataset import UNKNOWN, Dataset, dataset_of_files
from largebatch.data.decode import DecodeOptions, decode
from largebatch.data.sources.files import IMAGE_SUFFIXES, FileSet, image_names, is_image, open_files
from largebatch.data.sources.splits import split_named, splits_of_folders
from largebatch.util import UserError

log = logging.getLogger("largebatch")

# Words in the names of folders that hold a split, plain images, or dense targets.
NO_CLASS = re.compile(
    r"train(ing|val)?|val(id(ation)?)?|dev|eval(uation)?|test(ing)?|holdout|(un)?labell?ed|(image|img)s?"
    r"|(mask|label|annotation|depth|background)s?|gt|groundtruth|seg(s|mentations?)?"
)
SHOWN_NAMES = 10


def class_folders(files: FileSet, options: DecodeOptions) -> Dataset:
    """Return the data set of class folders. An id is "Class/file", or "train/Class/file" where there are splits.

    Classes are the folders that hold the images. They lie in one folder, or in split folders side by side, which
    are named train, val (or validation, valid, dev) and test, in any case. A train folder alone publishes no split:
    it is a folder around all classes like any other.

    Raises:
      UserError: it is not clear what is a class or a split, or one of them has no images.
    """
    where = files.where
    names = [name for name in files.names if is_image(name, where)]
    others = [name for name in files.names if not is_image(name, where)]
    if ignored := sum(not name.endswith("/") for name in others):
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    folders = sorted(set(map(dirname, names)))
    if not any(folders):
        raise UserError(f"{where} has no class folders; expected Class/image.jpg")
    if "" in folders:
        stray = next(name for name in names if "/" not in name)
        raise UserError(f"{where}: {stray!r} is in no class folder; expected Class/image.jpg")
    split_of = splits_of_folders(set(map(dirname, folders)), where)
    class_names = sorted(set(map(basename, folders)))
    _refuse_names_of_no_classes(class_names, where)
    _refuse_empty_folders(others, folders, where)
    if len(class_names) < 2:
        raise UserError(f"{where} has one class, {class_names[0]!r}; at least 2 are needed")
    folders_of_class = Counter(map(basename, folders))
    for folder in folders if split_of else ():
        if folders_of_class[basename(folder)] == 1:
            found = f"class {basename(folder)!r} is only in {split_of[dirname(folder)]}"
            raise UserError(f"{where}: {found}; allowed: the same classes in every split")
    splits = [split_of[dirname(dirname(name))] for name in names] if split_of else None
    ids = ["/".join(name.split("/")[-2:]) for name in names]
    if splits:
        ids = [f"{split}/{example_id}" for split, example_id in zip(splits, ids, strict=True)]
    label_of = {name: label for label, name in enumerate(class_names)}
    return _images(files, names, ids, label_of, options, splits)


def find_images(path: str, class_names: list[str], options: DecodeOptions) -> Dataset:
    """Return the data set of all images in a folder or zip of any layout.

    The label is UNKNOWN where the folder is none of `class_names`.

    Raises:
      UserError: there are no images.
    """
    files = open_files(path, "--images")
    names, label_of = image_names(files), {name: label for label, name in enumerate(class_names)}
    return _images(files, names, names, label_of, options)


def _images(
    files: FileSet,
    names: list[str],
    ids: list[str],
    label_of: dict[str, int],
    options: DecodeOptions,
    splits: list[str] | None = None,
) -> Dataset:
    """Return the data set of the images of these names, whose folders are their classes."""

    def decode_examples(examples: Sequence[int]) -> Iterable[np.ndarray]:
        return (decode(names[example], files.read(names[example]), options) for example in examples)

    labels = [label_of.get(basename(dirname(name)), UNKNOWN) for name in names]
    return dataset_of_files(files.path, ids, labels, list(label_of), decode_examples, splits=splits)


def _refuse_names_of_no_classes(class_names: list[str], where: str) -> None:
    """Refuse folders that all have names of splits or of dense targets: their images have no classes.

    Where one folder has another name, all of them are classes.
    """
    for name in map(str.lower, class_names):
        rest = NO_CLASS.sub("", name)
        if rest == name or any(map(str.isalpha, rest)):
            return
    shown = ", ".join(map(repr, class_names[:SHOWN_NAMES])) + ", ..." * (len(class_names) > SHOWN_NAMES)
    raise UserError(
        f"{where} has its images in {shown}, which name splits, images or maps, not classes; allowed: "
        "CLASS/image.jpg (dataset.split_file may tell the splits), train/CLASS/image.jpg, or task.name "
        "segmentation | depth | mask_depth with images/NAME.jpg beside masks/NAME.png, depths/NAME.png or both"
    )


def _refuse_empty_folders(others: list[str], classes: list[str], where: str) -> None:
    """Raise UserError for classes, and for splits, that hold no image but are listed or hold something else."""
    listed = set(map(dirname, others)) - {""}
    with_those_around = set().union(*(accumulate(folder.split("/"), "{}/{}".format) for folder in listed))
    outers, class_names = set(map(dirname, classes)), set(map(basename, classes))
    around = {dirname(outer) for outer in outers if split_named(basename(outer))}
    for folder in sorted(with_those_around - outers - set(classes)):
        name = basename(folder)
        if dirname(folder) in around and split_named(name):
            raise UserError(f"{where}: split folder {name!r} has no images")
        if dirname(folder) in outers and name not in class_names and folder in listed:
            raise UserError(f"{where}: class {name!r} has no images")

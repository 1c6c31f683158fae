"""Images in class folders, and their splits where a set is published in splits.

Class/image.jpg          folders around all classes are ignored
train/Class/image.jpg    beside val/Class/image.jpg, test/Class/image.jpg, or both
"""

import logging
import re
from collections import Counter
from itertools import accumulate
from posixpath import basename, dirname

from largebatch.data.dataset import UNKNOWN, Dataset, dataset_of_files
from largebatch.data.decode import DecodeOptions, decoder
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
      UserError: it is not clear what is a class or a split, one of them has no images, a name is there twice, or
        the first image is damaged.
    """
    where, folder_of, others = files.where, {}, []
    for name in files.names:
        if not is_image(name, where):
            others.append(name)
        elif name in folder_of:
            raise UserError(f"{where} holds {name!r} twice")
        else:
            folder_of[name] = name.rpartition("/")[0]
    if ignored := sum(not name.endswith("/") for name in others):
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    classes = sorted(set(folder_of.values()))
    if not any(classes):
        raise UserError(f"{where} has no class folders; expected Class/image.jpg")
    if "" in classes:
        stray = next(name for name in folder_of if "/" not in name)
        raise UserError(f"{where}: {stray!r} is in no class folder; expected Class/image.jpg")
    split_of = splits_of_folders(set(map(dirname, classes)), where)
    class_names = sorted(set(map(basename, classes)))
    _refuse_names_of_no_classes(class_names, where)
    _refuse_empty_folders(others, classes, where)
    if len(class_names) < 2:
        raise UserError(f"{where} has one class, {class_names[0]!r}; at least 2 are needed")
    prefix_of = {folder: f"{basename(folder)}/" for folder in classes}
    if split_of:
        count_of = Counter(map(basename, classes))
        for folder in classes:
            if count_of[basename(folder)] == 1:
                found = f"class {basename(folder)!r} is only in {split_of[dirname(folder)]}"
                raise UserError(f"{where}: {found}; allowed: the same classes in every split")
        prefix_of = {folder: f"{split_of[dirname(folder)]}/{basename(folder)}/" for folder in classes}
    label_of = {folder: class_names.index(basename(folder)) for folder in classes}
    names = list(folder_of)
    ids = [prefix_of[folder] + basename(name) for name, folder in folder_of.items()]
    labels = [label_of[folder] for folder in folder_of.values()]
    splits = [split_of[dirname(folder)] for folder in folder_of.values()] if split_of else None
    read = decoder(ids, lambda examples: (files.read(names[i]) for i in examples), options)
    return dataset_of_files(files.path, ids, labels, class_names, read, splits=splits)


def find_images(path: str, class_names: list[str], options: DecodeOptions) -> Dataset:
    """Return the data set of all images in a folder or zip of any layout.

    The label is UNKNOWN where the folder is none of `class_names`.

    Raises:
      UserError: there are no images, or the first one is damaged.
    """
    files = open_files(path, "--images")
    names = image_names(files)
    label_of = {name: label for label, name in enumerate(class_names)}
    labels = [label_of.get(basename(dirname(name)), UNKNOWN) for name in names]
    read = decoder(names, lambda examples: (files.read(names[i]) for i in examples), options)
    return dataset_of_files(files.path, names, labels, class_names, read)


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
    listed = {name.rpartition("/")[0] for name in others} - {""}
    with_those_around = set().union(*(accumulate(folder.split("/"), "{}/{}".format) for folder in listed))
    outers, class_names = set(map(dirname, classes)), set(map(basename, classes))
    around = {dirname(outer) for outer in outers if split_named(basename(outer))}
    for folder in sorted(with_those_around - outers - set(classes)):
        name = basename(folder)
        if dirname(folder) in around and split_named(name):
            raise UserError(f"{where}: split folder {name!r} has no images")
        if dirname(folder) in outers and name not in class_names and folder in listed:
            raise UserError(f"{where}: class {name!r} has no images")

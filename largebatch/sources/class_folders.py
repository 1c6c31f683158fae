"""Classes of images, and their splits where a set is published in splits, parsed from the names of files.

Class/image.jpg          folders around all classes are ignored
train/Class/image.jpg    beside val/Class/image.jpg, test/Class/image.jpg, or both
"""

import logging
import posixpath
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath

from largebatch import untrusted
from largebatch.util import UserError

log = logging.getLogger("largebatch")

SPLITS = ("train", "val", "test")

_NAMES = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
ALLOWED_NAMES = " | ".join(_NAMES)


def split_named(name: str) -> str | None:
    """Return the one of SPLITS that a publisher means by `name`, in any case; None if it names no split."""
    return _NAMES.get(name.lower())


IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
# Control characters, line ends and surrogate escapes of bytes that are no UTF-8: no line of text can hold them.
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Words in the names of folders that hold a split, plain images, or dense targets.
SPLIT_WORD = re.compile(r"train(ing|val)?|val(id(ation)?)?|dev|eval(uation)?|test(ing)?|holdout|(un)?labell?ed")
IMAGE_WORD = re.compile(r"(image|img)s?")
MAP_WORD = re.compile(r"(mask|label|annotation|depth|background)s?|gt|groundtruth|seg(s|mentations?)?")
BETWEEN_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+")
SHOWN_NAMES = 10


@dataclass(frozen=True)
class ParsedNames:
    """Images among some names, in the order of the names; everything but `class_names` is per image."""

    names: list[str]
    ids: list[str]  # "Class/file", or "train/Class/file" where there are splits
    labels: list[int]
    splits: list[str] | None  # each of SPLITS; None where the set has no split folders
    class_names: list[str]  # sorted


def parse_names(names: list[str], where: str) -> ParsedNames:
    """Parse the classes and published splits of the images among `names`.

    Classes are the folders that hold the images. They lie in one folder, or in split folders side by side, which
    are named train, val (or validation, valid, dev) and test, in any case. A train folder alone publishes no split:
    it is a folder around all classes like any other.

    Args:
      names: relative names of all files, with "/" between the parts; those that end in "/" are folders.
      where: the folder or zip that holds them, with the field that names it, for messages.
    Raises:
      UserError: a name twice; classes at several places, without images, fewer than two, or in one split only;
        classes that are all called as splits or as kinds of maps; split folders without images or without train,
        or two for one split.
    """
    parent_of, folders = _images_and_folders(names, where)
    parents = set(parent_of.values())
    top = PurePosixPath(".")
    if parents <= {top}:
        raise UserError(f"{where} has no class folders; expected Class/image.jpg")
    if top in parents:
        stray = next(name for name, parent in parent_of.items() if parent == top)
        raise UserError(f"{where}: {stray!r} is in no class folder; expected Class/image.jpg")
    outers = {parent.parent for parent in parents}
    split_of = _split_folders(outers, where)
    class_names = sorted({parent.name for parent in parents})
    _refuse_names_of_no_classes(class_names, where)
    _refuse_empty_folders(folders, parents, outers, where)
    if len(class_names) < 2:
        raise UserError(f"{where} has one class, {class_names[0]!r}; at least 2 are needed")
    if split_of:
        _refuse_classes_of_one_split(parents, split_of, where)
    label_of = {name: label for label, name in enumerate(class_names)}
    prefix_of = {parent: f"{parent.name}/" for parent in parents}
    if split_of:
        prefix_of = {parent: f"{split_of[parent.parent]}/{prefix}" for parent, prefix in prefix_of.items()}
    ids = [prefix_of[parent] + name.rpartition("/")[2] for name, parent in parent_of.items()]
    labels = [label_of[parent.name] for parent in parent_of.values()]
    splits = [split_of[parent.parent] for parent in parent_of.values()] if split_of else None
    return ParsedNames(list(parent_of), ids, labels, splits, class_names)


def _images_and_folders(names: list[str], where: str) -> tuple[dict[str, PurePosixPath], set[PurePosixPath]]:
    """Return the folder of each image by its name, and the folders that have an entry or hold something else.

    Paths take longer than all else here, so one is made for each folder, not for each of millions of images.
    """
    parent_of, folders, ignored = {}, set(), 0
    path_of = {}  # by the name up to the last "/"; None if the folder is hidden
    for name in names:
        before, _, file = name.rpartition("/")
        if before not in path_of:
            path = PurePosixPath(before)
            path_of[before] = None if is_hidden(path) else path
        parent = path_of[before]
        if parent is None or file.startswith(untrusted.HIDDEN):
            continue
        if name.endswith("/"):
            folders.add(parent)
        elif not is_image(name, where):
            folders.add(parent)
            ignored += 1
        elif name in parent_of:
            raise UserError(f"{where} holds {name!r} twice")
        else:
            parent_of[name] = parent
    if ignored:
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    return parent_of, folders


def _split_folders(outers: set[PurePosixPath], where: str) -> dict[PurePosixPath, str]:
    """Return the split of each of the folders around classes; empty if there is only one such folder."""
    if len(outers) == 1:
        return {}
    split_of = {outer: split_named(outer.name) for outer in sorted(outers)}
    if None in split_of.values() or len({outer.parent for outer in outers}) > 1:
        places = ", ".join(str(outer) for outer in list(split_of)[:4])
        raise UserError(
            f"{where} has class folders at several places ({places}); give one of them, or let them "
            "be train, val and test"
        )
    folder_of = {}
    for outer, split in split_of.items():
        if split in folder_of:
            raise UserError(f"{where} has two folders for {split}, {folder_of[split]} and {outer}; allowed: one")
        folder_of[split] = outer
    if "train" not in folder_of:
        raise UserError(
            f"{where} has the split folders {', '.join(folder_of)}; allowed: train, with val, test or both"
        )
    return split_of


def _refuse_names_of_no_classes(class_names: list[str], where: str) -> None:
    """Refuse folders that all have names of splits or of dense targets, with or without numbers.

    Such sets hold the images of a split in one folder, or masks beside images. If one folder has another name, all
    of them are classes.

    Raises:
      UserError: no folder has the name of a class.
    """
    words_of = [_words(name) for name in class_names]
    if not all(words and all(map(_is_no_class, words)) for words in words_of):
        return
    shown = ", ".join(map(repr, class_names[:SHOWN_NAMES])) + (", ..." if len(class_names) > SHOWN_NAMES else "")
    of_splits = all(any(map(SPLIT_WORD.fullmatch, words)) for words in words_of)
    if of_splits and not any(MAP_WORD.fullmatch(word) for words in words_of for word in words):
        raise UserError(
            f"{where} has its images in {shown}, which are names of splits, not of classes; allowed: class folders "
            "inside the splits (train/CLASS/image.jpg), or class folders alone, with dataset.split_file or without"
        )
    raise UserError(
        f"{where} has its images in {shown}, which are names of images and their maps, not of classes; allowed: "
        "task.name segmentation | depth | mask_depth with images/NAME.jpg and masks/NAME.png, depths/NAME.png or "
        "both, or class folders"
    )


def _words(name: str) -> list[str]:
    """Return the words in a folder's name: "train_2017" and "Train" are the word train."""
    return [word.lower() for word in BETWEEN_WORDS.split(name) if word]


def _is_no_class(word: str) -> bool:
    return any(kind.fullmatch(word) for kind in (SPLIT_WORD, IMAGE_WORD, MAP_WORD))


def _refuse_empty_folders(
    folders: set[PurePosixPath], parents: set[PurePosixPath], outers: set[PurePosixPath], where: str
) -> None:
    """Raise UserError for classes, and for splits beside those of `outers`, that have no image at all."""
    class_names = {parent.name for parent in parents}
    around = {outer.parent for outer in outers if split_named(outer.name)}
    with_those_around = folders.union(*(folder.parents for folder in folders))
    for folder in sorted(with_those_around - outers - parents):
        if folder.parent in around and split_named(folder.name):
            raise UserError(f"{where}: split folder {folder.name!r} has no images")
        if folder.parent in outers and folder.name not in class_names and folder in folders:
            raise UserError(f"{where}: class {folder.name!r} has no images")


def _refuse_classes_of_one_split(
    parents: set[PurePosixPath], split_of: dict[PurePosixPath, str], where: str
) -> None:
    splits_of_class = defaultdict(list)
    for parent in sorted(parents):
        splits_of_class[parent.name].append(split_of[parent.parent])
    for name, splits in splits_of_class.items():
        if len(splits) == 1:
            raise UserError(
                f"{where}: class {name!r} is only in {splits[0]}; allowed: the same classes in every split"
            )


def is_hidden(path: PurePosixPath) -> bool:
    """Return True for hidden files that operating systems leave in folders and zips, or files in such folders."""
    return any(part.startswith(untrusted.HIDDEN) for part in path.parts)


def is_image(name: str, where: str) -> bool:
    """Return True if the suffix of a name is that of an image; the name must fit into one line of text.

    Raises:
      UserError: the name holds unsafe characters; the message begins with `where`.
    """
    if name.endswith("/") or posixpath.splitext(name)[1].lower() not in IMAGE_SUFFIXES:
        return False
    if UNSAFE_CHARACTERS.search(name):
        raise UserError(f"{where} holds the unsafe name {name!a}; allowed: no control characters, UTF-8")
    return True

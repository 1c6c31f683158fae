"""Which files of a set of images with masks, depths or both belong together, from their names alone.

images/NAME.jpg        the images
masks/NAME.png         a class for each pixel, from 0 on; for all images or for none
depths/NAME.png        8 or 16 bits, 0 to the largest; for all images or for none
backgrounds/NAME.jpg   the same view without objects: further channels of the image; for all images or for none
classes.txt            the names of the classes, a line each; without it background and object, 0 and 1 or 255

Suffixes may differ, and folders around all of these are left off. Splits are folders around these four, or the
first ones within each: train/images/NAME.jpg or images/train/NAME.jpg.
"""

import dataclasses
from pathlib import PurePosixPath

from largebatch.errors import UserError
from largebatch.sources.class_folders import is_hidden, is_image
from largebatch.sources.split_names import split_named

IMAGES, MASKS, DEPTHS, BACKGROUNDS = KINDS = ("images", "masks", "depths", "backgrounds")
CLASSES_FILE = "classes.txt"


@dataclasses.dataclass(frozen=True)
class FileKey:
    """What the files of an image have in common.

    Attributes:
      outer: the folders around images/, with "/" between them.
      inner: the name within it, without its suffix.
    """

    outer: str
    inner: str


@dataclasses.dataclass(frozen=True)
class ParsedMaps:
    """The images of a set and what belongs to them; lists are by image.

    Attributes:
      names: of the files, by kind; a kind that no image has is left out.
      splits: each of SPLITS; None where the set has no split folders.
      classes_file: None where there is none.
    """

    ids: list[str]
    names: dict[str, list[str]]
    splits: list[str] | None
    classes_file: str | None


def has_images_folder(names: list[str]) -> bool:
    """Whether this is such a set, and not any folder of images."""
    return any(IMAGES in PurePosixPath(name).parts[:-1] for name in names)


def parse_map_names(names: list[str], where: str, *, may_lack_maps: bool = False) -> ParsedMaps:
    """Which files belong together.

    Args:
      where: the folder or zip that they are of, with the field that says so, for messages.
      may_lack_maps: there need be neither masks nor depths.
    Raises:
      UserError: an image has no mask or depth; some have a background and others have none; a map has no image; a
        file is no image; split folders that cannot be told.
    """
    found, classes_files = _files_by_kind(names, where)
    keys = sorted(found[IMAGES], key=lambda key: (key.outer, key.inner))
    if not keys:
        raise UserError(f"{where} has no folder images/ with images; expected images/NAME.png and masks/NAME.png")
    if not may_lack_maps and not found[MASKS] and not found[DEPTHS]:
        raise UserError(f"{where} has neither masks/ nor depths/; expected masks/NAME.png for images/NAME.png")
    for kind in KINDS:
        _refuse_missing(found[IMAGES], found[kind], kind, where)
    splits = _splits_of(keys, where)
    has_outer = len({key.outer for key in keys}) > 1
    return ParsedMaps(
        ids=[f"{split}/{key.inner}" if has_outer else key.inner for split, key in zip(splits, keys, strict=True)],
        names={kind: [of_kind[key] for key in keys] for kind, of_kind in found.items() if of_kind},
        splits=None if None in splits else splits,
        classes_file=_only_classes_file(classes_files, where),
    )


def _files_by_kind(names: list[str], where: str) -> tuple[dict[str, dict[FileKey, str]], list[str]]:
    """The files of each kind, and those that name classes."""
    found: dict[str, dict[FileKey, str]] = {kind: {} for kind in KINDS}
    classes_files = []
    for name in names:
        path = PurePosixPath(name)
        if name.endswith("/") or is_hidden(path):
            continue
        if path.name == CLASSES_FILE:
            classes_files.append(name)
        kind_at = next((index for index, part in enumerate(path.parts[:-1]) if part in KINDS), None)
        if kind_at is None:
            continue
        kind, inner = path.parts[kind_at], PurePosixPath(*path.parts[kind_at + 1 :])
        if not is_image(name, where):
            raise UserError(f"{where}: {name} is no image; allowed in {kind}/: images alone")
        key = FileKey("/".join(path.parts[:kind_at]), str(inner.with_suffix("")))
        if key in found[kind]:
            raise UserError(f"{where} holds {found[kind][key]} and {name}; allowed: one of them")
        found[kind][key] = name
    return found, classes_files


def _refuse_missing(images: dict[FileKey, str], of_kind: dict[FileKey, str], kind: str, where: str) -> None:
    """A kind is there for all images or for none."""
    if not of_kind:
        return
    without = [name for key, name in images.items() if key not in of_kind]
    if without:
        missing = f"{len(without)} of {len(images)} images have no file in {kind}/, as others have"
        raise UserError(f"{where}: {missing}; the first is {without[0]}")
    strays = [name for key, name in of_kind.items() if key not in images]
    if strays:
        raise UserError(f"{where}: {strays[0]} belongs to no image; allowed: files named as those in images/")


def _splits_of(keys: list[FileKey], where: str) -> list[str | None]:
    """The split of each image; None for all where the set has no split folders."""
    outers = {key.outer for key in keys}
    if len(outers) > 1:
        split_of = {outer: split_named(PurePosixPath(outer).name) for outer in sorted(outers)}
        folders = [key.outer for key in keys]
    else:
        firsts = {PurePosixPath(key.inner).parts[0] if "/" in key.inner else "" for key in keys}
        split_of = {first: split_named(first) for first in sorted(firsts)}
        if not any(split_of.values()):
            return [None] * len(keys)
        folders = [PurePosixPath(key.inner).parts[0] if "/" in key.inner else "" for key in keys]
    splits = list(split_of.values())
    if None in splits or len(set(splits)) < len(splits) or "train" not in splits:
        places = ", ".join(folder or "." for folder in split_of)
        raise UserError(
            f"{where} has images in {places}; allowed: in one images/ folder, or in train and val, test or both"
        )
    return [split_of[folder] for folder in folders]


def _only_classes_file(files: list[str], where: str) -> str | None:
    if len(files) > 1:
        raise UserError(f"{where} holds {files[0]} and {files[1]}; allowed: one {CLASSES_FILE}")
    return files[0] if files else None

"""Images with masks or depths beside them, in folders or a zip."""

import dataclasses
from posixpath import basename

import numpy as np

from largebatch.data.dataset import UNKNOWN, Dataset, dataset_of_files
from largebatch.data.decode import DecodeOptions, decode, resized
from largebatch.data.sources.files import FileSet, image_names, is_image, open_files
from largebatch.data.sources.splits import split_named, splits_of_folders
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError

IMAGES, MASKS, DEPTHS, BACKGROUNDS = KINDS = ("images", "masks", "depths", "backgrounds")
CLASSES_FILE = "classes.txt"
TWO_CLASSES, LARGEST_MASK_VALUE = ("background", "object"), 255
NO_VOID = ", for no value means yet that a pixel is not labelled"
SHOWN_VALUES = 8
SCALE_OF_8_BITS = planes.LARGEST_DEPTH // 255


def maps(files: FileSet, options: DecodeOptions) -> Dataset:
    """Return the data set of images with dense targets.

    Raises:
      UserError: files that do not belong together, see `parse_map_names`; bad class names.
    """
    parsed = parse_map_names(files.names, files.where)
    return _dataset(files, parsed, _targets_of(files, parsed), options)


def find_maps(path: str, targets: PixelTargets, channels: int, options: DecodeOptions) -> Dataset:
    """Return the data set of all images in a folder or zip, with their dense targets.

    Images without masks and depths have the label UNKNOWN and targets of 0. Without backgrounds they may lie in any
    folders.

    Args:
      targets: the dense targets of the run.
      channels: number of channels of an image, with its background.
    Raises:
      UserError: no images, or other targets or channels than the run's, or a bad first image.
    """
    files = open_files(path, "--images")
    if any(IMAGES in name.split("/")[:-1] for name in files.names):
        parsed = parse_map_names(files.names, files.where, may_lack_maps=True)
    else:
        names = image_names(files)
        parsed, options = ParsedMaps(names, {IMAGES: names}), dataclasses.replace(options, channels=channels)
    of_files = _targets_of(files, parsed)
    if of_files.planes and of_files != targets:
        raise UserError(f"{files.where} has {of_files.text}; allowed: {targets.text}, as the run")
    dataset = _dataset(files, parsed, targets, options)
    found = dataset.image_shape[-1] - targets.planes
    if found != channels:
        raise UserError(f"{files.where} has images of {found} channels; allowed: {channels}, as the run")
    return dataset


# ---- files that belong together ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ParsedMaps:
    """Images of a set with the files that belong to them; lists are by image.

    Attributes:
      names: names of the files, by kind; a kind that no image has is left out.
      splits: one of SPLITS for each image; None where the set has no split folders.
      classes_file: name of the file of class names, or None.
    """

    ids: list[str]
    names: dict[str, list[str]]
    splits: list[str] | None = None
    classes_file: str | None = None


def parse_map_names(names: list[str], where: str, *, may_lack_maps: bool = False) -> ParsedMaps:
    """Match the files that belong to the same image.

    Args:
      where: the folder or zip that holds them, with the field that names it, for messages.
      may_lack_maps: True if masks and depths may both be missing.
    Raises:
      UserError: an image has no mask or depth; some have a background and others have none; a target has no image;
        a file is no image; unclear split folders.
    """
    found: dict[str, dict[tuple[str, str], str]] = {kind: {} for kind in KINDS}  # names by outer and inner folders
    for name in names:
        parts = name.split("/")
        kind_at = next((index for index, part in enumerate(parts[:-1]) if part in KINDS), None)
        if kind_at is None or name.endswith("/"):
            continue
        kind = parts[kind_at]
        if not is_image(name, where):
            raise UserError(f"{where}: {name} is no image; allowed in {kind}/: images alone")
        key = "/".join(parts[:kind_at]), "/".join(parts[kind_at + 1 :]).rpartition(".")[0]
        if key in found[kind]:
            raise UserError(f"{where} holds {found[kind][key]} and {name}; allowed: one of them")
        found[kind][key] = name
    keys = sorted(found[IMAGES])
    if not keys:
        raise UserError(f"{where} has no folder images/ with images; expected images/NAME.png and masks/NAME.png")
    if not may_lack_maps and not found[MASKS] and not found[DEPTHS]:
        raise UserError(f"{where} has neither masks/ nor depths/; expected masks/NAME.png for images/NAME.png")
    for kind in filter(found.get, KINDS):
        _refuse_missing(found[IMAGES], found[kind], kind, where)
    ids, folders = [inner for _, inner in keys], [outer for outer, _ in keys]
    are_around = len(set(folders)) > 1
    if not are_around:  # splits may also lie within images/
        folders = [inner.partition("/")[0] if "/" in inner else "" for inner in ids]
    splits = None
    if are_around or any(map(split_named, folders)):
        split_of = splits_of_folders(set(folders), where)
        splits = [split_of[folder] for folder in folders]
    if are_around:
        ids = [f"{split}/{inner}" for split, inner in zip(splits, ids, strict=True)]
    names_of = {kind: [of_kind[key] for key in keys] for kind, of_kind in found.items() if of_kind}
    classes_files = [name for name in names if basename(name) == CLASSES_FILE]
    if len(classes_files) > 1:
        raise UserError(f"{where} has {len(classes_files)} files {CLASSES_FILE}; allowed: one")
    return ParsedMaps(ids, names_of, splits, classes_files[0] if classes_files else None)


def _refuse_missing(images: dict[tuple, str], of_kind: dict[tuple, str], kind: str, where: str) -> None:
    """Raise UserError unless all images have a file of a kind, and all files of it an image."""
    if without := [name for key, name in images.items() if key not in of_kind]:
        missing = f"{len(without)} of {len(images)} images have no file in {kind}/, as others have"
        raise UserError(f"{where}: {missing}; the first is {without[0]}")
    if strays := [name for key, name in of_kind.items() if key not in images]:
        raise UserError(f"{where}: {strays[0]} belongs to no image; allowed: files named as those in images/")


def _targets_of(files: FileSet, parsed: ParsedMaps) -> PixelTargets:
    """Return the dense targets of files; read the names of their classes."""
    has_depth, name = DEPTHS in parsed.names, parsed.classes_file
    if MASKS not in parsed.names:
        return PixelTargets((), has_depth)
    if name is None:
        return PixelTargets(TWO_CLASSES, has_depth)
    lines = files.read(name).decode("utf-8-sig", "replace").splitlines()
    classes = tuple(line.strip() for line in lines if line.strip())
    if repeated := [one for one in classes if classes.count(one) > 1]:
        raise UserError(f"{files.where}: {name} names {repeated[0]!r} twice; allowed: once")
    if not 2 <= len(classes) <= LARGEST_MASK_VALUE:
        raise UserError(f"{files.where}: {name} names {len(classes)} class(es); allowed: 2 to {LARGEST_MASK_VALUE}")
    return PixelTargets(classes, has_depth)


# ---- pixels ------------------------------------------------------------------------------------------


def _dataset(files: FileSet, parsed: ParsedMaps, targets: PixelTargets, options: DecodeOptions) -> Dataset:
    """Return the data set of images uint8 [H, W, channels and targets]; missing targets are 0."""
    as_they_are = DecodeOptions(max_pixels=options.max_pixels)
    options_of = dict.fromkeys(KINDS, dataclasses.replace(options, size=None)) | {
        MASKS: dataclasses.replace(as_they_are, indices=True),
        DEPTHS: as_they_are,
    }
    object_in: dict[int, str] = {}  # by the value of the object of two classes: the first mask that has it

    def decode_example(example: int) -> np.ndarray:
        decoded = {}
        for kind, names in parsed.names.items():
            name = names[example]
            pixels = decode(name, files.read(name), options_of[kind])
            if kind == DEPTHS and pixels.dtype == np.uint8:
                pixels = pixels.astype(np.uint16) * SCALE_OF_8_BITS
            decoded[kind] = pixels
            _check_pixels(name, kind, pixels, decoded[IMAGES])
            if kind == MASKS:
                decoded[kind] = _checked_mask(name, pixels, len(targets.classes), object_in)
        pictures = [decoded[kind] for kind in (IMAGES, BACKGROUNDS) if kind in decoded]
        picture = resized(np.concatenate(pictures, axis=-1), options.size, options.resize)
        mask, depth = (
            resized(decoded[kind], options.size, options.resize, nearest=True)[..., 0] if kind in decoded else None
            for kind in (MASKS, DEPTHS)
        )
        if mask is None and depth is None:
            return np.pad(picture, ((0, 0), (0, 0), (0, targets.planes)))
        return planes.join(picture, mask, depth)

    label = 0 if MASKS in parsed.names or DEPTHS in parsed.names else UNKNOWN
    return dataset_of_files(
        files.path,
        parsed.ids,
        np.full(len(parsed.ids), label),
        ["image"],
        lambda examples: map(decode_example, examples),
        splits=parsed.splits,
        targets=targets,
    )


def _checked_mask(name: str, mask: np.ndarray, num_classes: int, object_in: dict[int, str]) -> np.ndarray:
    """Return the classes of a mask; refuse values that are none, and 255 beside 1, where it means no label.

    Args:
      object_in: the first masks that have 1 and 255 for the object of two classes, by these values; filled here.
    """
    values = np.unique(mask).tolist()
    allowed = f"0 to {num_classes - 1}" if num_classes > 2 else "0 and 1, or 0 and 255"
    if values[-1] >= num_classes and not (num_classes == 2 and {0, LARGEST_MASK_VALUE}.issuperset(values)):
        shown = values if len(values) <= SHOWN_VALUES else [*values[: SHOWN_VALUES - 1], "...", values[-1]]
        void = NO_VOID if LARGEST_MASK_VALUE in values else ""
        raise UserError(f"{name} has the values {', '.join(map(str, shown))}; allowed: {allowed}{void}")
    if num_classes > 2:
        return mask
    if values[-1] > 0:
        object_in.setdefault(values[-1], name)
    if len(object_in) == 2:
        found = f"{object_in[1]} has the value 1, and {object_in[LARGEST_MASK_VALUE]} the value 255"
        raise UserError(f"{found}; allowed: {allowed}{NO_VOID}")
    return np.minimum(mask, 1)


def _check_pixels(name: str, kind: str, pixels: np.ndarray, image: np.ndarray) -> None:
    """Raise UserError if the file of a kind is not of its image's size, or has other channels or another type."""
    (height, width, channels), (wanted_height, wanted_width, _) = pixels.shape, image.shape
    if (height, width) != (wanted_height, wanted_width):
        allowed = f"{wanted_width}x{wanted_height}, as its image"
        raise UserError(f"{name} is of {width}x{height} pixels; allowed: {allowed}")
    if kind in (MASKS, DEPTHS) and channels != 1:
        raise UserError(f"{name} has {channels} channels; allowed: 1")
    if kind != DEPTHS and pixels.dtype != np.uint8:
        raise UserError(f"{name} is of {pixels.dtype}; allowed: uint8")

"""Sets of images with masks or depths beside them, in folders or a zip."""

import contextlib
import dataclasses
from pathlib import PurePosixPath

import numpy as np

from largebatch.decoding import images
from largebatch.sources.class_folders import is_hidden, is_image
from largebatch.sources.file_sets import FileSet, find_images, fingerprint_of, open_set
from largebatch.sources.source import Source
from largebatch.sources.split import split_named
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError

IMAGES, MASKS, DEPTHS, BACKGROUNDS = KINDS = ("images", "masks", "depths", "backgrounds")
CLASSES_FILE = "classes.txt"


@dataclasses.dataclass(frozen=True)
class FileKey:
    """Common part of the names of an image's files.

    Attributes:
      outer: the folders around images/, with "/" between them.
      inner: the name within it, without its suffix.
    """

    outer: str
    inner: str


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
    splits: list[str] | None
    classes_file: str | None


def has_images_folder(names: list[str]) -> bool:
    """Return True if a set has a folder images/, as sets with dense targets do."""
    return any(IMAGES in PurePosixPath(name).parts[:-1] for name in names)


def parse_map_names(names: list[str], where: str, *, may_lack_maps: bool = False) -> ParsedMaps:
    """Match the files that belong to the same image.

    Args:
      where: the folder or zip that holds them, with the field that names it, for messages.
      may_lack_maps: True if masks and depths may both be missing.
    Raises:
      UserError: an image has no mask or depth; some have a background and others have none; a target has no image;
        a file is no image; unclear split folders.
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
    """Return the files of each kind by their keys, and the files of class names."""
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
    """Raise UserError unless all images or none have a file of a kind."""
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
    """Return the split of each image; None for all where the set has no split folders."""
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


MAX_CLASSES_BYTES = 2**16  # of the file of class names
TWO_CLASSES, LARGEST_MASK_VALUE = ("background", "object"), 255
NO_VOID = ", for no value means yet that a pixel is not labelled"
SHOWN_VALUES = 8
SCALE_OF_8_BITS = planes.LARGEST_DEPTH // 255
OPTIONS = {MASKS: images.DecodeOptions(indices=True), DEPTHS: images.DecodeOptions()}


def map_source(files: FileSet, options: images.DecodeOptions, max_pixels: int) -> Source:
    """Create the source of a set of images with dense targets.

    Raises:
      UserError: as of `parse_map_names`; or classes.txt names fewer than 2 classes.
    """
    parsed = parse_map_names(files.names, files.where)
    targets = _targets_of(files, parsed)
    decoder = _Decoder(parsed, options, targets)

    @contextlib.contextmanager
    def open_pixels():
        limits = images.Limits(max_pixels)
        with files.opened() as file_of, images.pillow_limited_to(max_pixels):
            yield lambda indices, out=None: [decoder.stored(index, file_of, limits) for index in indices]

    every_name = [name for of_kind in parsed.names.values() for name in of_kind]
    listing = files.stamps([*every_name, *([parsed.classes_file] if parsed.classes_file else [])])
    return Source(
        description=files.path,
        fingerprint=f"maps-3 {fingerprint_of(listing, options)} {list(targets.classes)}",
        ids=parsed.ids,
        labels=np.zeros(len(parsed.ids), np.int32),
        class_names=["image"],
        open=open_pixels,
        splits=parsed.splits,
        targets=targets,
    )


def _targets_of(files: FileSet, parsed: ParsedMaps) -> PixelTargets:
    classes = _read_classes(files, parsed.classes_file) if MASKS in parsed.names else ()
    return PixelTargets(classes, DEPTHS in parsed.names)


def _read_classes(files: FileSet, name: str | None) -> tuple[str, ...]:
    if name is None:
        return TWO_CLASSES
    with files.opened() as file_of:
        file, where = file_of(name), f"{files.where}: {name}"
        if file.num_bytes > MAX_CLASSES_BYTES:
            raise UserError(f"{where} has {file.num_bytes:,} bytes; allowed: up to {MAX_CLASSES_BYTES:,}")
        lines = file.read().decode("utf-8-sig", "replace").splitlines()
    classes = tuple(line.strip() for line in lines if line.strip())
    repeated = [name for name in classes if classes.count(name) > 1]
    if repeated:
        raise UserError(f"{where} names {repeated[0]!r} twice; allowed: once")
    if not 2 <= len(classes) <= LARGEST_MASK_VALUE:
        raise UserError(f"{where} names {len(classes)} class(es); allowed: 2 to {LARGEST_MASK_VALUE}")
    return classes


def _listed(values: np.ndarray) -> str:
    """Return the values of a mask in words, as "0, 1 and 255"; of many, the first ones and the last."""
    *others, last = map(str, values)
    if len(others) > SHOWN_VALUES:
        others = [*others[:SHOWN_VALUES], "..."]
    return f"{', '.join(others)} and {last}" if others else last


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """Decoder of an image and its dense targets into one array."""

    parsed: ParsedMaps
    options: images.DecodeOptions
    targets: PixelTargets
    # The values that marked the object of two classes, each with the mask that had it.
    object_in: dict[int, str] = dataclasses.field(default_factory=dict)

    def stored(self, index: int, file_of, limits: images.Limits) -> np.ndarray:
        """Decode an image with its targets, uint8 [H, W, channels and targets]; missing targets are 0.

        Raises:
          UserError: a target is not of the size of the image, or holds values that are no class or no depth.
        """
        decoded = {}
        for kind in self.parsed.names:
            decoded[kind] = self._decode(kind, index, file_of, limits)
            self._refuse(kind, index, decoded)
        if MASKS in decoded and len(self.targets.classes) == 2:
            decoded[MASKS] = np.minimum(decoded[MASKS], 1)  # 255 is the object, too
        picture = np.concatenate([decoded[kind] for kind in (IMAGES, BACKGROUNDS) if kind in decoded], axis=-1)
        if MASKS not in decoded and DEPTHS not in decoded:
            picture = self._resized(picture)
            return np.pad(picture, ((0, 0), (0, 0), (0, self.targets.planes)))
        return planes.join(
            self._resized(picture),
            self._resized(decoded[MASKS], nearest=True)[..., 0] if MASKS in decoded else None,
            self._resized(decoded[DEPTHS], nearest=True)[..., 0] if DEPTHS in decoded else None,
        )

    def _decode(self, kind: str, index: int, file_of, limits: images.Limits) -> np.ndarray:
        """Decode the file of a kind without resizing: masks uint8, depths uint16."""
        name = self.parsed.names[kind][index]
        file = file_of(name)
        options = OPTIONS.get(kind, dataclasses.replace(self.options, size=None))
        pixels = images.decode(images.ImageFile(name, 0, file.num_bytes, file.read), options, limits)
        if kind == DEPTHS and pixels.dtype == np.uint8:
            return pixels.astype(np.uint16) * SCALE_OF_8_BITS
        return pixels

    def _refuse(self, kind: str, index: int, decoded: dict[str, np.ndarray]) -> None:
        """Raise UserError if the array that was decoded last does not fit the image."""
        name, found = self.parsed.names[kind][index], decoded[kind]
        (height, width, channels), (wanted_height, wanted_width, _) = found.shape, decoded[IMAGES].shape
        if (height, width) != (wanted_height, wanted_width):
            allowed = f"{wanted_width}x{wanted_height}, as its image"
            raise UserError(f"{name} is of {width}x{height} pixels; allowed: {allowed}")
        if kind in (MASKS, DEPTHS) and channels != 1:
            raise UserError(f"{name} has {channels} channels; allowed: 1")
        if kind != DEPTHS and found.dtype != np.uint8:
            raise UserError(f"{name} is of {found.dtype}; allowed: uint8")
        if kind == MASKS:
            self._refuse_values(name, found)

    def _refuse_values(self, name: str, mask: np.ndarray) -> None:
        """Refuse values that are no class, and 255 beside 1, where it means that a pixel is not labelled.

        1 and 255 may also be in two masks of a set. Several threads check: each first records what it found itself.
        """
        num_classes = len(self.targets.classes)
        if num_classes > 2:
            if mask.max() == LARGEST_MASK_VALUE:
                values = _listed(np.unique(mask))
                raise UserError(f"{name} has the values {values}; allowed: 0 to {num_classes - 1}{NO_VOID}")
            if mask.max() >= num_classes:
                raise UserError(f"{name} has the value {mask.max()}; allowed: 0 to {num_classes - 1}")
            return
        if (largest := np.where(mask == LARGEST_MASK_VALUE, 0, mask).max()) > 1:
            raise UserError(f"{name} has the value {largest}; allowed: 0 and 1, or 0 and 255")
        self.object_in.update({value: name for value in (1, LARGEST_MASK_VALUE) if (mask == value).any()})
        if len(self.object_in) == 2:
            with_1, with_255 = self.object_in[1], self.object_in[LARGEST_MASK_VALUE]
            found = f"{with_1} has the value 1, and {with_255} the value 255"
            if with_1 == with_255 == name:
                found = f"{name} has the values {_listed(np.unique(mask))}"
            raise UserError(f"{found}; allowed: 0 and 1, or 0 and 255{NO_VOID}")

    def _resized(self, pixels: np.ndarray, *, nearest: bool = False) -> np.ndarray:
        return images.resized(pixels, self.options.size, self.options.resize, nearest=nearest)


def find_maps(
    path: str, targets: PixelTargets, channels: int, options: images.DecodeOptions, max_pixels: int
) -> images.Dataset:
    """Decode all images in a folder or zip, with their dense targets.

    Images without masks and depths have label -1 and targets of 0. Without backgrounds they may lie in any folders.

    Args:
      targets: the dense targets of the run.
      channels: number of channels of an image, with its background.
    Raises:
      UserError: no images, or other targets than the run's, or a bad image or target.
    """
    files = open_set(path, "--images")
    if not has_images_folder(files.names):
        found = find_images(path, [], dataclasses.replace(options, channels=channels), max_pixels)
        return dataclasses.replace(found, images=np.pad(found.images, [(0, 0)] * 3 + [(0, targets.planes)]))
    parsed = parse_map_names(files.names, files.where, may_lack_maps=True)
    are_known = MASKS in parsed.names or DEPTHS in parsed.names
    of_files = _targets_of(files, parsed)
    if are_known and of_files != targets:
        raise UserError(f"{files.where} has {of_files.text}; allowed: {targets.text}, as the run")
    decoder = _Decoder(parsed, options, targets)
    with files.opened() as file_of:
        stored = images.decode_each(
            parsed.ids, lambda index, limits: decoder.stored(index, file_of, limits), max_pixels
        )
    if stored.shape[-1] != channels + targets.planes:
        found = stored.shape[-1] - targets.planes
        raise UserError(f"{files.where} has images of {found} channels; allowed: {channels}, as the run")
    labels = np.full(len(parsed.ids), 0 if are_known else -1, np.int32)
    return images.Dataset(stored, labels, ["image"], parsed.ids)

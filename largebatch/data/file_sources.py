"""Images in a zip or a folder of class folders."""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import re
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np
from etils import epath

from largebatch import untrusted
from largebatch.data import images
from largebatch.data.source import Source
from largebatch.errors import UserError

log = logging.getLogger("largebatch")

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
# Control characters, line ends, and what stands for bytes that are no UTF-8: no line of text can hold them.
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def zip_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> Source:
    """The source of a zip of class folders.

    Raises:
      UserError: the zip cannot be read, or its names are no class folders.
    """
    entries = untrusted.list_zip(path, "dataset.path")
    labels, class_names = _labels_of([entry.filename for entry in entries], str(path))
    entries = {entry.filename: entry for entry in entries if entry.filename in labels}
    for entry in entries.values():
        untrusted.check_entry(entry, f"dataset.path: {path}")
    ids = [_example_id(name, class_names[label]) for name, label in labels.items()]
    # The directory of a zip holds the CRC-32 and size of every file: hashing it stands for the content.
    listing = [f"{e.filename} {e.file_size} {e.CRC}" for e in entries.values()]

    @contextlib.contextmanager
    def open_pixels():
        with untrusted.open_zip(path) as archive, images.pillow_limited_to(max_pixels):
            files = [
                _from_zip(archive, entries[name], example_id, label)
                for (name, label), example_id in zip(labels.items(), ids, strict=True)
            ]
            yield _decoder(files, options, max_pixels)

    return Source(
        description=str(path),
        fingerprint=_fingerprint(listing, options),
        ids=ids,
        labels=np.array(list(labels.values()), np.int32),
        class_names=class_names,
        open=open_pixels,
    )


def folder_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> Source:
    """The source of a folder of class folders; raises as `zip_source`."""
    if not path.is_dir():
        raise UserError(f"dataset.path: {path} is not a folder; dataset.source 'folder' needs one")
    paths = untrusted.list_folder(pathlib.Path(path), "dataset.path")
    labels, class_names = _labels_of(list(paths), str(path))
    ids = [_example_id(name, class_names[label]) for name, label in labels.items()]
    stats = {name: _stat(paths[name], "dataset.path") for name in labels}
    listing = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]

    @contextlib.contextmanager
    def open_pixels():
        files = [
            _from_folder(paths[name], stats[name].st_size, example_id, label)
            for (name, label), example_id in zip(labels.items(), ids, strict=True)
        ]
        with images.pillow_limited_to(max_pixels):
            yield _decoder(files, options, max_pixels)

    return Source(
        description=str(path),
        fingerprint=_fingerprint(listing, options),
        ids=ids,
        labels=np.array(list(labels.values()), np.int32),
        class_names=class_names,
        open=open_pixels,
    )


def _decoder(
    files: list[images.ImageFile], options: images.DecodeOptions, max_pixels: int
) -> Callable[..., list[np.ndarray]]:
    limits = images.Limits(max_pixels)
    return lambda indices: [images.decode(files[index], options, limits) for index in indices]


def _from_folder(path: pathlib.Path, num_bytes: int, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(
        example_id, label, num_bytes, functools.partial(untrusted.read_regular, path, num_bytes)
    )


def _from_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(
        example_id, label, entry.file_size, functools.partial(untrusted.read_entry, archive, entry)
    )


def _stat(path: pathlib.Path, field: str) -> os.stat_result:
    try:
        return untrusted.stat_regular(path)
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read ({error.strerror})") from error


def _example_id(name: str, class_name: str) -> str:
    return f"{class_name}/{PurePosixPath(name).name}"


def _fingerprint(listing: list[str], options: images.DecodeOptions) -> str:
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {options}"


def _labels_of(names: list[str], where: str) -> tuple[dict[str, int], list[str]]:
    """Labels of the images among `names` (those that end in "/" are folders), and the class names.

    Classes are the folders that hold the images; folders around all of them are left off.
    """
    paths, folders, ignored = {}, set(), 0
    for name in names:
        path = PurePosixPath(name)
        if _is_hidden(path):
            continue
        if name.endswith("/"):
            folders.add(path)
        elif not _is_image(name, f"dataset.path: {where}"):
            folders.add(path.parent)
            ignored += 1
        elif name in paths:
            raise UserError(f"dataset.path: {where} holds {name!r} twice")
        else:
            paths[name] = path
    if ignored:
        log.info("%s: ignored %d files that are not %s", where, ignored, "/".join(IMAGE_SUFFIXES))
    parents = {path.parent for path in paths.values()}
    outers = {parent.parent for parent in parents}
    if not paths or PurePosixPath(".") in parents:
        raise UserError(f"dataset.path: {where} has no class folders; expected Class/image.jpg")
    if len(outers) > 1:
        places = ", ".join(sorted(str(outer) for outer in outers)[:4])
        raise UserError(f"dataset.path: {where} has class folders at several places ({places}); give one of them")
    for folder in sorted(folders - parents):
        if folder.parent in outers and folder not in outers:
            raise UserError(f"dataset.path: {where}: class {folder.name!r} has no images")
    class_names = sorted(parent.name for parent in parents)
    if len(class_names) < 2:
        raise UserError(f"dataset.path: {where} has one class, {class_names[0]!r}; at least 2 are needed")
    return {name: class_names.index(path.parent.name) for name, path in paths.items()}, class_names


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(untrusted.HIDDEN) for part in path.parts)


def _is_image(name: str, where: str) -> bool:
    """By the end of its name, which must fit into one line of text."""
    if name.endswith("/") or PurePosixPath(name).suffix.lower() not in IMAGE_SUFFIXES:
        return False
    if UNSAFE_CHARACTERS.search(name):
        raise UserError(f"{where} holds the unsafe name {name!a}; allowed: no control characters, UTF-8")
    return True


def find_images(
    path: str,
    class_names: list[str],
    options: images.DecodeOptions,
    max_image_pixels: int = images.MAX_IMAGE_PIXELS,
) -> images.Dataset:
    """All images in a folder or zip, whatever its folders; label -1 where the folder is none of `class_names`.

    Raises:
      UserError: nothing there, or an image is damaged or has more than `max_image_pixels`.
    """
    root, where = epath.Path(path).expanduser(), f"--images: {path}"
    if not root.exists():
        raise UserError(f"{where} does not exist")
    with contextlib.ExitStack() as stack:
        if root.is_dir():
            paths = untrusted.list_folder(pathlib.Path(root), "--images")
            names = [name for name in paths if _is_image(name, where)]
            sizes = {name: _stat(paths[name], "--images").st_size for name in names}
            make = {name: functools.partial(_from_folder, paths[name], sizes[name]) for name in names}
        else:
            entries = {entry.filename: entry for entry in untrusted.list_zip(root, "--images")}
            names = sorted(
                name for name in entries if _is_image(name, where) and not _is_hidden(PurePosixPath(name))
            )
            for name in names:
                untrusted.check_entry(entries[name], where)
            archive = stack.enter_context(untrusted.open_zip(root))
            make = {name: functools.partial(_from_zip, archive, entries[name]) for name in names}
        if not names:
            raise UserError(f"{where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
        index = {name: label for label, name in enumerate(class_names)}
        encoded = [make[name](name, index.get(PurePosixPath(name).parent.name, -1)) for name in names]
        return images.decode_dataset(encoded, class_names, options, max_image_pixels)

"""Images in a zip or a folder of class folders."""

import contextlib
import functools
import hashlib
import os
import pathlib
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np
from etils import epath

from largebatch import untrusted
from largebatch.decoding import images
from largebatch.errors import UserError
from largebatch.sources.class_folders import IMAGE_SUFFIXES, ParsedNames, is_hidden, is_image, parse_names
from largebatch.sources.source import ReadPixels, Source


def zip_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> Source:
    """The source of a zip of class folders.

    Raises:
      UserError: the zip cannot be read, or its names are no class folders.
    """
    entries = untrusted.list_zip(path, "dataset.path")
    parsed = parse_names([entry.filename for entry in entries], str(path))
    by_name = {entry.filename: entry for entry in entries}
    entries = [by_name[name] for name in parsed.names]
    where = f"dataset.path: {path}"
    for entry in entries:
        untrusted.check_entry(entry, where)
    # The directory of a zip holds the CRC-32 and size of every file: hashing it stands for the content.
    listing = [f"{e.filename} {e.file_size} {e.CRC}" for e in entries]

    @contextlib.contextmanager
    def open_pixels():
        with untrusted.ZipReader(path, "dataset.path") as reader, images.pillow_limited_to(max_pixels):

            def file_at(index: int) -> images.ImageFile:
                return _from_zip(reader, entries[index], parsed.ids[index], parsed.labels[index])

            yield _decoder(file_at, options, max_pixels)

    return _source(path, _fingerprint(listing, options), parsed, open_pixels)


def folder_source(path: epath.Path, options: images.DecodeOptions, max_pixels: int) -> Source:
    """The source of a folder of class folders; raises as `zip_source`."""
    if not path.is_dir():
        raise UserError(f"dataset.path: {path} is not a folder; dataset.source 'folder' needs one")
    paths = untrusted.list_folder(pathlib.Path(path), "dataset.path")
    parsed = parse_names(list(paths), str(path))
    stats = {name: _stat(paths[name], "dataset.path") for name in parsed.names}
    listing = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]

    @contextlib.contextmanager
    def open_pixels():
        def file_at(index: int) -> images.ImageFile:
            name = parsed.names[index]
            return _from_folder(paths[name], stats[name].st_size, parsed.ids[index], parsed.labels[index])

        with images.pillow_limited_to(max_pixels):
            yield _decoder(file_at, options, max_pixels)

    return _source(path, _fingerprint(listing, options), parsed, open_pixels)


def _source(path: epath.Path, fingerprint: str, parsed: ParsedNames, open_pixels) -> Source:
    return Source(
        description=str(path),
        fingerprint=fingerprint,
        ids=parsed.ids,
        labels=np.array(parsed.labels, np.int32),
        class_names=parsed.class_names,
        open=open_pixels,
        splits=parsed.splits,
    )


def _decoder(
    file_at: Callable[[int], images.ImageFile], options: images.DecodeOptions, max_pixels: int
) -> ReadPixels:
    """Of files by their index: a list of them all would take longer to make than to read the directory of a zip."""
    limits = images.Limits(max_pixels)

    def read(indices, out=None):
        places = [None] * len(indices) if out is None else out
        return [
            images.decode(file_at(index), options, limits, place)
            for index, place in zip(indices, places, strict=True)
        ]

    return read


def _from_folder(path: pathlib.Path, num_bytes: int, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(
        example_id, label, num_bytes, functools.partial(untrusted.read_regular, path, num_bytes)
    )


def _from_zip(reader: untrusted.ZipReader, entry: zipfile.ZipInfo, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(example_id, label, entry.file_size, functools.partial(reader.read, entry))


def _stat(path: pathlib.Path, field: str) -> os.stat_result:
    try:
        return untrusted.stat_regular(path)
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read ({error.strerror})") from error


def _fingerprint(listing: list[str], options: images.DecodeOptions) -> str:
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {options}"


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
            names = [name for name in paths if is_image(name, where)]
            sizes = {name: _stat(paths[name], "--images").st_size for name in names}
            make = {name: functools.partial(_from_folder, paths[name], sizes[name]) for name in names}
        else:
            entries = {entry.filename: entry for entry in untrusted.list_zip(root, "--images")}
            names = sorted(name for name in entries if is_image(name, where) and not is_hidden(PurePosixPath(name)))
            for name in names:
                untrusted.check_entry(entries[name], where)
            reader = stack.enter_context(untrusted.ZipReader(root, "--images"))
            make = {name: functools.partial(_from_zip, reader, entries[name]) for name in names}
        if not names:
            raise UserError(f"{where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
        index = {name: label for label, name in enumerate(class_names)}
        encoded = [make[name](name, index.get(PurePosixPath(name).parent.name, -1)) for name in names]
        return images.decode_dataset(encoded, class_names, options, max_image_pixels)

"""Images in class folders, in a zip or a folder."""

import contextlib
import hashlib
from pathlib import PurePosixPath

import numpy as np

from largebatch.decoding import images
from largebatch.errors import UserError
from largebatch.sources import file_sets
from largebatch.sources.class_folders import IMAGE_SUFFIXES, is_hidden, is_image, parse_names
from largebatch.sources.file_sets import EncodedFile, FileSet
from largebatch.sources.source import Source


def class_source(files: FileSet, options: images.DecodeOptions, max_pixels: int) -> Source:
    """The source of class folders.

    Raises:
      UserError: the names of the files are no class folders, or a file cannot be read.
    """
    parsed = parse_names(files.names, files.where)
    listing = files.stamps(parsed.names)

    @contextlib.contextmanager
    def open_pixels():
        limits = images.Limits(max_pixels)
        with files.opened() as file_of, images.pillow_limited_to(max_pixels):

            def decode(index: int, place):
                file = _image_file(file_of(parsed.names[index]), parsed.ids[index], parsed.labels[index])
                return images.decode(file, options, limits, place)

            def read(indices, out=None):
                places = [None] * len(indices) if out is None else out
                return [decode(index, place) for index, place in zip(indices, places, strict=True)]

            yield read

    return Source(
        description=files.path,
        fingerprint=fingerprint_of(listing, options),
        ids=parsed.ids,
        labels=np.array(parsed.labels, np.int32),
        class_names=parsed.class_names,
        open=open_pixels,
        splits=parsed.splits,
    )


def fingerprint_of(listing: list[str], options: images.DecodeOptions) -> str:
    """Changes when a file does, or how it is decoded."""
    return f"files {hashlib.sha256(chr(10).join(listing).encode()).hexdigest()} {options}"


def _image_file(file: EncodedFile, example_id: str, label: int) -> images.ImageFile:
    return images.ImageFile(example_id, label, file.num_bytes, file.read)


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
    files, where = file_sets.open_set(path, "--images"), f"--images: {path}"
    names = sorted(name for name in files.names if is_image(name, where) and not is_hidden(PurePosixPath(name)))
    if not names:
        raise UserError(f"{where} holds no {'/'.join(IMAGE_SUFFIXES)} files")
    files.stamps(names)  # refuses what cannot be read
    label_of = {name: label for label, name in enumerate(class_names)}
    with files.opened() as file_of:
        encoded = [
            _image_file(file_of(name), name, label_of.get(PurePosixPath(name).parent.name, -1)) for name in names
        ]
        return images.decode_dataset(encoded, class_names, options, max_image_pixels)

"""Labelled images in memory: decoding, the synthetic set, and the split that every source shares."""

import concurrent.futures
import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image

from largebatch import UserError

SPLITS = ("train", "val", "test")


class Dataset(NamedTuple):
    """images uint8 [N, H, W, 3], labels int32 [N]; `example_ids` are `Class/file` where there are files."""

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    example_ids: list[str]


class Source(NamedTuple):
    """A data set that can be loaded; `fingerprint` changes when what `load` returns would."""

    description: str
    fingerprint: str
    load: Callable[[], Dataset]


class ImageFile(NamedTuple):
    """One image still encoded: its id, its class and how to read its bytes."""

    example_id: str
    label: int
    read: Callable[[], bytes]


def decode_dataset(files: list[ImageFile], class_names: list[str], image_size: int | None) -> Dataset:
    """Decodes all files; raises UserError as `decode_all`."""
    images = decode_all(files, image_size)
    labels = np.array([file.label for file in files], np.int32)
    return Dataset(images, labels, class_names, [file.example_id for file in files])


def decode_all(files: list[ImageFile], image_size: int | None) -> np.ndarray:
    """Decodes to uint8 [N, H, W, 3] on all cores, into one array.

    Raises:
      UserError: an image is damaged, not 8 bits deep, or of another size than the first; it is named.
    """
    first = decode(files[0], image_size)
    images = np.empty((len(files), *first.shape), np.uint8)

    def decode_range(begin: int, end: int) -> None:
        for i in range(begin, end):
            image = decode(files[i], image_size)
            if image.shape != first.shape:
                raise UserError(
                    f"dataset.image_size: {files[i].example_id} is {image.shape[1]}x{image.shape[0]} pixels, "
                    f"{files[0].example_id} is {first.shape[1]}x{first.shape[0]}; set a size to resize to"
                )
            images[i] = image

    run_ranges(decode_range, len(files))
    return images


def decode(file: ImageFile, image_size: int | None) -> np.ndarray:
    """One image as uint8 [H, W, 3]; grey and palette images become RGB."""
    try:
        with Image.open(io.BytesIO(file.read())) as image:
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{file.example_id}: pixels are of mode {image.mode}; allowed: 8 bits a channel")
            image = image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # Pillow and zipfile raise a dozen kinds on damaged input
        raise UserError(f"{file.example_id}: damaged image ({error})") from error
    if image_size and image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(image)


def run_ranges(work: Callable[[int, int], None], length: int) -> None:
    """Runs `work(begin, end)` over pieces of range(length) on one thread per core; first error wins."""
    num_workers = os.cpu_count() or 1
    edges = np.linspace(0, length, 4 * num_workers + 1).astype(int).tolist()
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(work, a, b) for a, b in itertools.pairwise(edges) if a < b]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ---- synthetic --------------------------------------------------------------------------------------

SYNTHETIC_CLASSES = ("checks", "disks", "noise", "rings", "stripes")


def synthetic(num_examples: int, size: int, seed: int) -> Dataset:
    """Textures in random colours: the class is the pattern, which mean colour does not tell.

    Every pattern looks alike under the 8 views, has random phase, scale and contrast, and carries noise.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(num_examples, dtype=np.int32) % len(SYNTHETIC_CLASSES)
    images = np.empty((num_examples, size, size, 3), np.uint8)
    for i, label in enumerate(labels):
        pattern = _pattern(SYNTHETIC_CLASSES[label], size, rng)
        mean, contrast = rng.uniform(90, 165, 3), rng.uniform(15, 50, 3) * rng.choice((-1, 1))
        pixels = mean + contrast * (pattern - pattern.mean())[..., None] + rng.normal(0, 12, (size, size, 3))
        images[i] = np.clip(pixels, 0, 255)
    return Dataset(images, labels, list(SYNTHETIC_CLASSES), [f"{i:06d}" for i in range(num_examples)])


def _pattern(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """One texture of +1 and -1, [size, size]."""
    y, x = np.mgrid[:size, :size].astype(np.float32)
    period = rng.uniform(6, 10)
    along_x, along_y = (np.sin(2 * np.pi * axis / period + rng.uniform(0, 2 * np.pi)) for axis in (x, y))
    radius = np.hypot(x - rng.uniform(0.3, 0.7) * size, y - rng.uniform(0.3, 0.7) * size)
    if kind == "checks":
        wave = along_x * along_y
    elif kind == "disks":
        wave = rng.uniform(0.15, 0.3) * size - radius
    elif kind == "noise":
        wave = rng.standard_normal((size, size))
    elif kind == "rings":
        wave = np.sin(2 * np.pi * radius / period + rng.uniform(0, 2 * np.pi))
    else:
        wave = along_x if rng.random() < 0.5 else along_y
    return np.where(wave > 0, 1.0, -1.0)


# ---- split ------------------------------------------------------------------------------------------


def split_indices(example_ids: list[str], seed: int) -> dict[str, np.ndarray]:
    """80/10/10 split: a seeded permutation of the examples sorted by id, so every source gives the same.

    Returns:
      For each of SPLITS the indices into `example_ids`.
    Raises:
      UserError: fewer than 10 examples, which would leave a part empty.
    """
    count = len(example_ids)
    if count < 10:
        raise UserError(f"the data set has {count} examples; at least 10 are needed for an 80/10/10 split")
    by_id = np.argsort(np.array(example_ids))
    order = by_id[np.random.default_rng(seed).permutation(count)]
    tenth = count // 10
    train, val, test = np.split(order, [count - 2 * tenth, count - tenth])
    return {"train": train, "val": val, "test": test}


def iterate_batches(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices that cover range(length)."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))

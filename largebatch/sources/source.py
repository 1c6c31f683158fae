"""Source of images, stamp of its files to detect changes, and sizes of published sets."""

import contextlib
import dataclasses
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from etils import epath

from largebatch import untrusted
from largebatch.tasks.planes import NO_TARGETS, PixelTargets


class ReadPixels(Protocol):
    """Function that decodes examples; several threads may call it at once."""

    def __call__(self, indices: Sequence[int], out: np.ndarray | None = None) -> list[np.ndarray]:
        """Return the pixels [H, W, C] of the examples with these indices.

        Args:
          out: [N, H, W, C], a buffer for the pixels that saves allocations. Images that fit may be put into it, and
            their results are then views of it.
        """


@dataclass(frozen=True)
class Source:
    """Examples of a data set, and how to decode them.

    Attributes:
      description: name and place of the source, for people.
      fingerprint: text that changes when the pixels that `open` gives do.
      ids: names of the examples; "Class/file" where there are files.
      labels: int32 [N].
      class_names: names by label.
      splits: "train", "val" or "test" for each example, where the source has published splits; else None.
      targets: dense targets that lie behind the channels of the images.
      open: context manager of a `ReadPixels`, which may raise UserError for a damaged image, named by its id.
    """

    description: str
    fingerprint: str
    ids: list[str]
    labels: np.ndarray
    class_names: list[str]
    open: Callable[[], contextlib.AbstractContextManager[ReadPixels]]
    splits: list[str] | None = None
    targets: PixelTargets = NO_TARGETS


def source_in_memory(
    description: str, fingerprint: str, ids: list[str], labels: np.ndarray, class_names: list[str], pixels
) -> Source:
    """Create a source of pixels [N, H, W, C], given as an array or by a function without arguments."""

    @contextlib.contextmanager
    def open_pixels():
        decoded = pixels() if callable(pixels) else pixels
        yield lambda indices, out=None: [decoded[index] for index in indices]

    return Source(description, fingerprint, ids, labels, class_names, open_pixels)


def stamp_of(places: list[epath.Path]) -> str | None:
    """Return a digest of (relative name, size, time of the last change) of all files in some places.

    Links are followed, and hidden files are left out, as where these files are listed. Times are in ns, but in a
    bucket in seconds.

    The digest takes one `stat` a file, 4 us on a local disk: 0.11 s for 27,000 files. A network disk may take
    longer.

    Args:
      places: folders and files; empty for a set that is generated, not read.
    Returns:
      The digest, or None if nothing is there that can be read.
    """
    digest, is_there = hashlib.sha256(), not places
    for place in places:
        digest.update(b"\0")
        for line in _lines(place):
            digest.update(line)
            is_there = True
    return digest.hexdigest() if is_there else None


def _lines(place: epath.Path) -> Iterator[bytes]:
    """Yield a line for each file and folder of a place, in an order that depends on their names alone."""
    is_local = "://" not in os.fspath(place)
    with contextlib.suppress(OSError, ValueError, RuntimeError, ImportError):  # nothing that this host can read
        yield from _local_lines(os.fspath(place)) if is_local else _lines_of_bucket(place)


def _lines_of_bucket(place: epath.Path) -> Iterator[bytes]:
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        status = path.stat()
        yield f"{os.fspath(path).removeprefix(os.fspath(place))} {status.length} {status.mtime}\n".encode()


def _local_lines(root: str) -> Iterator[bytes]:
    status = Path(root).stat()
    if not stat.S_ISDIR(status.st_mode):
        yield _line("", status)
        return
    linked = set()  # folders that links led to, against endless circles of links
    waiting = [("", root)]
    while waiting:
        prefix, folder = waiting.pop()
        entries = []
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith(untrusted.HIDDEN):
                continue
            name, status = prefix + entry.name, None
            with contextlib.suppress(OSError):  # as of a dangling link, which is reported when it is read
                status = entry.stat()
            if status is None or not stat.S_ISDIR(status.st_mode):
                yield _line(name, status)
                continue
            yield os.fsencode(f"{name}/\n")
            identity = status.st_dev, status.st_ino
            if not entry.is_symlink() or identity not in linked:
                waiting.append((f"{name}/", entry.path))
            if entry.is_symlink():
                linked.add(identity)


def _line(name: str, status: os.stat_result | None) -> bytes:
    return os.fsencode(name) + (f" {status.st_size} {status.st_mtime_ns}\n" if status else " unreadable\n").encode()


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """Size of a published set as the sources here return it, with its own splits or ours."""

    counts: dict[str, int]
    image_shape: tuple[int, int, int]  # height, width, channels; of sets of many sizes the most usual
    dtype: str
    num_classes: int


_EUROSAT = {"train": 21_600, "val": 2_700, "test": 2_700}
_CIFAR10 = {"train": 45_000, "val": 5_000, "test": 10_000}
SIZES = {
    "eurosat": PublishedSize(_EUROSAT, (64, 64, 3), "uint8", 10),
    "eurosat_ms": PublishedSize(_EUROSAT, (64, 64, 13), "uint16", 10),
    "cifar10": PublishedSize(_CIFAR10, (32, 32, 3), "uint8", 10),
    # ImageNet publishes no labels of its test images: our test images are cut from its training images.
    "imagenet2012": PublishedSize(
        {"train": 1_231_167, "val": 50_000, "test": 50_000}, (375, 500, 3), "uint8", 1000
    ),
}

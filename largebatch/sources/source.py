"""A data set that is listed, but not decoded yet."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from largebatch.tasks.planes import NO_TARGETS, PixelTargets


class ReadPixels(Protocol):
    """Decodes examples; several threads may call it at once."""

    def __call__(self, indices: Sequence[int], out: np.ndarray | None = None) -> list[np.ndarray]:
        """The pixels [H, W, C] of examples, by their index.

        Args:
          out: [N, H, W, C], room for the pixels that saves making some. Images that fit may be put there, at their
            place; what is returned for them is a view of it.
        """


@dataclass(frozen=True)
class Source:
    """Which examples there are, and how to decode them.

    Attributes:
      description: where it is, for people.
      fingerprint: changes when what `open` gives would.
      ids: of the examples; "Class/file" where there are files.
      labels: int32 [N].
      class_names: by label.
      splits: "train", "val" or "test" for each example, where the source has published splits; else None.
      targets: what lies behind the channels of the images.
      open: gives a `ReadPixels`, within a `with`. It may raise UserError for a damaged image, named by its id.
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
    """A source whose pixels [N, H, W, C] are there, or come from a function without arguments."""

    @contextlib.contextmanager
    def open_pixels():
        decoded = pixels() if callable(pixels) else pixels
        yield lambda indices, out=None: [decoded[index] for index in indices]

    return Source(description, fingerprint, ids, labels, class_names, open_pixels)

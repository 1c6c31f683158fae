"""Dense targets (mask, depth) as planes: further channels of an image, of 8 bits like its own.

So masks and depths are cached, verified, sharded over devices, streamed and moved by augmentations with their
image, as integers. First comes the mask, then the depth in two planes, the high byte first; either may be missing.

Functions take NumPy or JAX arrays; JAX is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from largebatch.tasks.kinds import KINDS, TaskKind
from largebatch.util import BadSetting

LARGEST_DEPTH = 65_535  # largest stored depth, which stands for 1
MASK_PLANES, DEPTH_PLANES = 1, 2


@dataclass(frozen=True)
class PixelTargets:
    """Dense targets of a data set, in the planes of its images; none where images have classes.

    Attributes:
      classes: names, by the value in the mask; () where there is no mask.
      has_depth: whether there is a depth.
    """

    classes: tuple[str, ...] = ()
    has_depth: bool = False

    @classmethod
    def recorded_in(cls, data: Mapping) -> "PixelTargets":
        """Read the targets from the description of a data set; see `record`."""
        if "targets" not in data:
            return NO_TARGETS
        return cls(tuple(data["targets"]["classes"]), data["targets"]["has_depth"])

    def record(self) -> dict:
        """Return the targets as plain JSON, for the description of a data set."""
        return {"targets": {"classes": list(self.classes), "has_depth": self.has_depth}} if self.planes else {}

    @property
    def planes(self) -> int:
        """Number of channels that the targets take."""
        return (MASK_PLANES if self.classes else 0) + (DEPTH_PLANES if self.has_depth else 0)

    @property
    def kind(self) -> TaskKind:
        """The kind of task that the targets are for."""
        wanted = bool(self.classes), self.has_depth
        return next(kind for kind in KINDS.values() if (kind.has_mask, kind.has_depth) == wanted)

    def check_task(self, name: str, dataset: str) -> None:
        """Raise BadSetting where the data set is not for the task of this name."""
        if name != self.kind.name:
            raise BadSetting(
                f"task.name: {name!r}; allowed: {self.kind.name!r} with {dataset}, which has {self.text}"
            )

    @property
    def text(self) -> str:
        """The targets in words."""
        masks = [f"masks of {', '.join(self.classes)}"] if self.classes else []
        depths = ["depths"] if self.has_depth else []
        return " and ".join([*masks, *depths]) or "classes of images"


NO_TARGETS = PixelTargets()  # where images have classes


def join(image: np.ndarray, mask: np.ndarray | None, depth: np.ndarray | None) -> np.ndarray:
    """Join an image uint8 [H, W, C] and its planes to uint8 [H, W, C + planes].

    Args:
      mask: classes [H, W], below 256; None where there is none.
      depth: uint16 [H, W]; None where there is none.
    """
    parts = [image]
    if mask is not None:
        parts.append(mask[..., None])
    if depth is not None:
        parts += [(depth >> 8)[..., None], (depth & 255)[..., None]]
    return np.concatenate([part.astype(np.uint8) for part in parts], axis=-1)


def split_planes(images: np.ndarray, num_planes: int) -> tuple[np.ndarray, np.ndarray]:
    """Split stored images [M, H, W, C + planes] into images [M, H, W, C] and their dense targets."""
    channels = images.shape[-1] - num_planes
    return images[..., :channels], images[..., channels:]


def classes_of(planes: np.ndarray) -> np.ndarray:
    """Return the classes int32 [M, H, W] of planes [M, H, W, P] with a mask."""
    return planes[..., 0].astype(np.int32)


def depths_of(planes: np.ndarray) -> np.ndarray:
    """Return the depths float32 [M, H, W], 0 to 1, of planes [M, H, W, P] with a depth."""
    high, low = (planes[..., index].astype(np.int32) for index in (-2, -1))
    return (256 * high + low).astype(np.float32) / LARGEST_DEPTH

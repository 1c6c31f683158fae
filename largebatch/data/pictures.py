"""Images of a cache as files, for people and for other programs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from largebatch.cache.cache import Cache
from largebatch.data.placement import split_planes
from largebatch.decoding.colours import class_colours, picture_of, shaded
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets
from largebatch.util import UserError, path_within

GAP = 2  # pixels between the pictures of a preview
AT_ONCE = 256  # images in memory at a time
# Channels of the PNG files of an image, by the number of its channels, with those of its background.
PICTURES = {
    1: {"images": [0]},
    2: {"images": [0], "backgrounds": [1]},
    3: {"images": [0, 1, 2]},
    6: {"images": [0, 1, 2], "backgrounds": [3, 4, 5]},
}


def draw_preview(
    cache: Cache, views_of: Callable[[np.ndarray], np.ndarray], path: str, num_images: int = 4, scale: int = 2
) -> None:
    """Draw a picture: a row for each image, of classes spread over all, and a column for each view.

    Below an image are its mask and its depth, where it has them.

    Args:
      views_of: images [n, H, W, C] -> their views [n, views, H, W, C].
    Raises:
      UserError: the picture cannot be written.
    """
    height, width, _ = cache.image_shape
    stored = cache.read_rows("train", _rows_to_show(cache, num_images)).reshape(-1, *cache.image_shape)
    rows = []
    for example in stored:
        (views,) = views_of(example[None])
        rows += zip(*_drawn_views(cache, views), strict=True)
    sheet = np.full((len(rows) * (height + GAP) - GAP, len(rows[0]) * (width + GAP) - GAP, 3), 255, np.uint8)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            y, x = row * (height + GAP), column * (width + GAP)
            sheet[y : y + height, x : x + width] = picture
    picture = Image.fromarray(sheet)
    try:
        picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--preview: cannot write {path} ({getattr(error, 'strerror', None) or error})") from error


def _rows_to_show(cache: Cache, count: int) -> np.ndarray:
    """Choose the first training image of each of some classes; some images where there is one class only."""
    labels, num_classes = cache.small_array("train_labels"), len(cache.class_names)
    if num_classes == 1:
        return np.unique(np.linspace(0, len(labels), count, endpoint=False).astype(int))
    classes = np.unique(np.linspace(0, num_classes, count, endpoint=False).astype(int))
    return np.array([np.flatnonzero(labels == label)[0] for label in classes])


def _drawn_views(cache: Cache, views: np.ndarray) -> list[list[np.ndarray]]:
    """Draw each view [H, W, C] of an example as pictures, uint8 [H, W, 3]: the image, a mask, a depth."""
    images, maps = split_planes(views, cache.targets.planes)
    drawn = [[picture_of(image)] for image in images]
    for pictures, of_view in zip(drawn, maps, strict=True):
        if cache.targets.classes:
            pictures.append(class_colours(planes.classes_of(of_view)))
        if cache.targets.has_depth:
            pictures.append(shaded(planes.depths_of(of_view)))
    return drawn


def export(cache: Cache, split: str, folder: str) -> int:
    """Write a split of a set with masks or depths as PNG files, as `sources.map_folders` reads them.

    Returns:
      The number of images.
    Raises:
      UserError: the set has neither, or images that are no PNG; or a file cannot be written.
    """
    source, targets = cache.manifest["source"], cache.targets
    channels = cache.image_shape[-1] - targets.planes
    if not targets.planes:
        raise UserError(f"--export: {source} has classes of images; allowed: sets of masks or depths")
    if channels not in PICTURES:
        allowed = ", ".join(map(str, PICTURES))
        raise UserError(f"--export: images of {source} have {channels} channels; allowed: {allowed}")
    root, names = Path(folder), cache.small_array(f"{split}_ids")
    try:
        for first in range(0, len(names), AT_ONCE):
            rows = np.arange(first, min(first + AT_ONCE, len(names)))
            stored = cache.read_rows(split, rows).reshape(-1, *cache.image_shape)
            for name, image, maps in zip(names[rows], *split_planes(stored, targets.planes), strict=True):
                files = _pictures_of(image) | _maps_of(targets, maps)
                for kind, pixels in files.items():
                    path = path_within(root / kind, f"{name}.png", "--export")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(path)
        if targets.classes:
            (root / "classes.txt").write_text("\n".join(targets.classes) + "\n")
    except OSError as error:
        raise UserError(f"--export: cannot write {folder} ({error.strerror or error})") from error
    return len(names)


def _pictures_of(image: np.ndarray) -> dict[str, np.ndarray]:
    """Return an image [H, W, C] and its background, by their folder: grey [H, W] or colours [H, W, 3]."""
    return {
        folder: np.ascontiguousarray(image[..., bands].squeeze(-1) if len(bands) == 1 else image[..., bands])
        for folder, bands in PICTURES[image.shape[-1]].items()
    }


def _maps_of(targets: PixelTargets, maps: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mask and the depth of planes [H, W, P], by their folder."""
    found = {}
    if targets.classes:
        found["masks"] = planes.classes_of(maps).astype(np.uint8)
    if targets.has_depth:
        found["depths"] = np.rint(planes.depths_of(maps) * planes.LARGEST_DEPTH).astype(np.uint16)
    return found

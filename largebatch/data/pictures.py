"""Images, masks and depths in colours for a screen, and a data set as files for people and other programs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from largebatch.data.dataset import Dataset
from largebatch.tasks import planes
from largebatch.tasks.planes import PixelTargets, split_planes
from largebatch.util import UserError, iterate_batches, path_within, writing

SHOWN_IMAGES = 4  # in a preview, at most
GAP = 2  # pixels between the pictures of a preview
AT_ONCE = 256  # images in memory at a time
# Channels of the PNG files of an image, by the number of its channels, with those of its background.
PICTURES = {
    1: {"images": [0]},
    2: {"images": [0], "backgrounds": [1]},
    3: {"images": [0, 1, 2]},
    6: {"images": [0, 1, 2], "backgrounds": [3, 4, 5]},
}
# Indices of red, green and blue, by the number of bands. Sentinel-2 has B04, B03 and B02 behind B01 in all 13 bands
# (level 1C) and in the 12 without B10 (level 2A); the 10 of BigEarthNet begin with B02.
BANDS = {10: (2, 1, 0), 12: (3, 2, 1), 13: (3, 2, 1)}
PERCENTILES = (2, 98)  # of a picture's values: darker ones become black, brighter ones white
BACKGROUND = np.uint8([32, 34, 40])  # the first class
# Colours of the other classes, repeated after the last.
CLASS_COLOURS = np.uint8(
    [[86, 156, 255], [255, 173, 70], [92, 200, 132], [214, 110, 190], [240, 226, 90], [150, 120, 230]]
)
# Colour map for depths and their errors, from dark to bright, evenly spaced.
SHADES = np.float32([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])


def draw_preview(dataset: Dataset, views_of: Callable[[np.ndarray], np.ndarray], path: str) -> None:
    """Draw a picture: a row for each image, of classes spread over all, and a column for each view.

    Below an image are its mask and its depth, where it has them.

    Args:
      views_of: images [n, H, W, C] -> their views [n, views, H, W, C].
    Raises:
      UserError: the picture cannot be written.
    """
    height, width, _ = dataset.image_shape
    rows = []
    for example in dataset.images(_examples_to_show(dataset)):
        (views,) = views_of(example[None])
        rows += zip(*_drawn_views(dataset.targets, views), strict=True)
    sheet = np.full((len(rows) * (height + GAP) - GAP, len(rows[0]) * (width + GAP) - GAP, 3), 255, np.uint8)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            y, x = row * (height + GAP), column * (width + GAP)
            sheet[y : y + height, x : x + width] = picture
    picture = Image.fromarray(sheet)
    try:
        ImageOps.scale(picture, 2, Image.Resampling.NEAREST).save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--preview: cannot write {path} ({getattr(error, 'strerror', None) or error})") from error


def _examples_to_show(dataset: Dataset) -> np.ndarray:
    """Choose the first image of each of some classes; some images where there is one class only."""
    first_of_classes = np.unique(dataset.labels, return_index=True)[1]
    examples = first_of_classes if len(first_of_classes) > 1 else np.arange(len(dataset.ids))
    return examples[np.unique(np.linspace(0, len(examples), SHOWN_IMAGES, endpoint=False).astype(int))]


def _drawn_views(targets: PixelTargets, views: np.ndarray) -> list[list[np.ndarray]]:
    """Draw each view [H, W, C] of an example as pictures, uint8 [H, W, 3]: the image, a mask, a depth."""
    images, maps = split_planes(views, targets.planes)
    drawn = [[picture_of(image)] for image in images]
    for pictures, of_view in zip(drawn, maps, strict=True):
        if targets.classes:
            pictures.append(class_colours(planes.classes_of(of_view)))
        if targets.has_depth:
            pictures.append(shaded(planes.depths_of(of_view)))
    return drawn


def export(dataset: Dataset, folder: str) -> int:
    """Write a data set with masks or depths as PNG files, as `sources.maps` reads them.

    Returns:
      The number of images.
    Raises:
      UserError: the set has neither, or images that are no PNG; or a file cannot be written.
    """
    targets, name = dataset.targets, dataset.description
    channels = dataset.image_shape[-1] - targets.planes
    if not targets.planes:
        raise UserError(f"--export: {name} has classes of images; allowed: sets of masks or depths")
    if channels not in PICTURES:
        allowed = ", ".join(map(str, PICTURES))
        raise UserError(f"--export: images of {name} have {channels} channels; allowed: {allowed}")
    root = Path(folder)
    with writing(folder, "--export"):
        for some in iterate_batches(len(dataset.ids), AT_ONCE):
            images, maps = split_planes(dataset.images(np.arange(some.start, some.stop)), targets.planes)
            for example_id, image, of_image in zip(dataset.ids[some], images, maps, strict=True):
                for kind, pixels in (_pictures_of(image) | _maps_of(targets, of_image)).items():
                    path = path_within(root / kind, f"{example_id}.png", "--export")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(path)
        if targets.classes:
            (root / "classes.txt").write_text("\n".join(targets.classes) + "\n")
    return len(dataset.ids)


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


# ---- colours ------------------------------------------------------------------------------------------


def to_rgb8(pixels: np.ndarray) -> np.ndarray:
    """Convert pixels uint8 or uint16 [H, W, C] to uint8 [H, W, 3] for display.

    8-bit grey and RGB stay as they are. Others are stretched between PERCENTILES of the three bands together, so
    that the colours keep their relation: measurements rarely fill the range of their integers. Red, green and blue
    are those of BANDS, else the first three; of one or two channels the first, as grey.
    """
    channels = pixels.shape[-1]
    chosen = pixels[..., list(BANDS.get(channels, (0, 1, 2) if channels >= 3 else (0, 0, 0)))]
    if pixels.dtype == np.uint8 and channels in (1, 3):
        return chosen
    low, high = np.percentile(chosen, PERCENTILES)
    if low == high:  # one colour: scaled by the range of its integers
        low, high = 0, np.iinfo(pixels.dtype).max
    scaled = (chosen.astype(np.float32) - low) * (255 / (high - low))
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def picture_of(image: np.ndarray) -> np.ndarray:
    """Convert an image [H, W, C] by `to_rgb8`, without the background that channels 4 to 6 may hold."""
    return to_rgb8(image[..., :3] if image.shape[-1] == 6 else image)


def class_colours(classes: np.ndarray) -> np.ndarray:
    """Convert classes [H, W] to colours uint8 [H, W, 3]."""
    others = CLASS_COLOURS[(classes - 1) % len(CLASS_COLOURS)]
    return np.where((classes == 0)[..., None], BACKGROUND, others)


def shaded(values: np.ndarray) -> np.ndarray:
    """Convert numbers [H, W], clipped to 0 to 1, to colours uint8 [H, W, 3]."""
    places = np.linspace(0, 1, len(SHADES))
    channels = [np.interp(values, places, SHADES[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)

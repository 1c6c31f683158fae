"""Sets that are not 8-bit RGB squares, made from EuroSAT's tiles: 13 bands of 16 bits, grey, rectangles.

    python tests/data/tile_sets.py bands|grey|rectangles FOLDER IMAGES_PER_CLASS

writes FOLDER/CLASS/CLASS_N.tif or .png from ../shared/data/EuroSAT.zip.
"""

import io
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

ZIP = Path(__file__).parents[3] / "shared" / "data" / "EuroSAT.zip"
# Of each of the 13 bands of Sentinel-2, in the order of its files: how much of red, green and blue is in it, how
# much of the local contrast, and by how much it is multiplied to get to the range of its reflectance.
BANDS = np.array(
    [
        (0.0, 0.2, 0.8, 0.0, 12),
        (0.0, 0.0, 1.0, 0.0, 10),  # B02, blue
        (0.0, 1.0, 0.0, 0.0, 10),  # B03, green
        (1.0, 0.0, 0.0, 0.0, 10),  # B04, red
        (0.8, 0.2, 0.0, 0.1, 11),
        (0.4, 0.6, 0.0, 0.3, 14),
        (0.2, 0.8, 0.0, 0.5, 16),
        (-0.2, 1.0, 0.2, 0.8, 18),
        (-0.1, 1.0, 0.1, 0.6, 17),
        (0.1, 0.1, 0.8, 0.0, 4),
        (0.0, 0.0, 0.1, 0.0, 1),
        (0.7, 0.5, -0.2, 0.4, 15),
        (0.9, 0.3, -0.2, 0.2, 12),
    ]
)


def bands_of(rgb: np.ndarray) -> np.ndarray:
    """13 bands, uint16 [H, W, 13], of a tile uint8 [H, W, 3]."""
    colour = rgb.astype(np.float64)
    grey = colour.mean(axis=-1)
    contrast = np.abs(np.gradient(grey)[0]) + np.abs(np.gradient(grey)[1])
    parts = np.concatenate([colour, contrast[..., None]], axis=-1)
    return np.clip(parts @ BANDS[:, :4].T * BANDS[:, 4] + 200, 0, 65535).astype(np.uint16)


def encoded(kind: str, rgb: np.ndarray) -> tuple[str, bytes]:
    """Suffix and content of a file of `kind`."""
    buffer = io.BytesIO()
    if kind == "bands":
        tifffile.imwrite(buffer, bands_of(rgb), photometric="minisblack", compression="zlib", planarconfig="contig")
        return ".tif", buffer.getvalue()
    pixels = rgb[8:56] if kind == "rectangles" else rgb
    Image.fromarray(pixels).convert("L" if kind == "grey" else "RGB").save(buffer, "PNG")
    return ".png", buffer.getvalue()


def write_tiles(kind: str, folder: Path, images_per_class: int, class_names: tuple[str, ...] = ()) -> None:
    """Write the first images of every class, or of these classes, to folder/CLASS/."""
    with zipfile.ZipFile(ZIP) as archive:
        written = Counter()
        for name in sorted(name for name in archive.namelist() if name.endswith(".jpg")):
            class_name, stem = name.split("/")[-2], Path(name).stem
            if (class_names and class_name not in class_names) or written[class_name] == images_per_class:
                continue
            written[class_name] += 1
            suffix, content = encoded(kind, np.asarray(Image.open(io.BytesIO(archive.read(name)))))
            path = folder / class_name / f"{stem}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


if __name__ == "__main__":
    write_tiles(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

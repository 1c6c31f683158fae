"""Pictures of few bytes that would take gigabytes: refused before they are decoded, whatever kind they are."""

import io
import json
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, decode_all, make_folder
from PIL import Image

from configs import default
from largebatch.decoding import images
from largebatch.sources.file_sets import find_images
from largebatch.sources.find import find_source
from largebatch.util import UserError


def chunk(kind: bytes, content: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", zlib.crc32(kind + content))


def black_png(size: int, *chunks: bytes) -> bytes:
    """A square PNG of one bit a pixel, with further chunks before its pixels."""
    header = chunk(b"IHDR", struct.pack(">LLBBBBB", size, size, 1, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(size * (1 + (size + 7) // 8)), 9))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def gif_of_a_large_frame() -> bytes:
    """16 x 16 pixels, whose first frame has 60,000 x 60,000 that Pillow would clear when it opens the file."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0x80, 0, 0) + bytes(6)
    control = b"!\xf9\x04\x08\x00\x00\x00\x00"
    return screen + control + b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x01\x00\x00;"


def tiff_of_many_strips(count: int) -> bytes:
    """16 x 16 pixels in `count` strips, of which Pillow would list every one."""
    values = {256: 16, 257: 16, 258: 8, 259: 1, 262: 1, 277: 1, 278: 1}
    tags = b"".join(struct.pack("<HHLL", tag, 3, 1, value) for tag, value in values.items())
    tags += struct.pack("<HHLL", 273, 3, count, 8 + 2 + 12 * 8 + 4)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", 8) + tags + bytes(4) + b"\1\0" * count


def write_zip(path: Path, content: bytes, *, times: int = 1, said: int | None = None) -> Path:
    """A zip of two classes; the first picture is `content`, so often, of which the directory says `said` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("a/0.png", "w") as entry:
            for _ in range(times):
                entry.write(content)
        archive.writestr("b/0.png", content)
    if said:
        packed = bytearray(path.read_bytes())
        struct.pack_into("<L", packed, packed.find(b"PK\x01\x02") + 24, said)
        path.write_bytes(packed)
    return path


SQUARE = images.DecodeOptions((16, 16))
TEXT = b"\0\0" + zlib.compress(bytes(2**20), 9)
BOMBS = {
    "entry of 1 GiB": (lambda: (bytes(2**20), {"times": 1024}), r"a/0.png: 1,073,741,824 bytes; allowed: up to"),
    "entry of 1 GiB that says 1 kB": (lambda: (bytes(2**20), {"times": 1024, "said": 1000}), "damaged image"),
    "13,300 x 13,300 pixels": (lambda: (black_png(13_300), {}), r"a/0.png: 176,890,000 pixels; allowed: up to"),
    "40,000 x 40,000 pixels": (lambda: (black_png(40_000), {}), r"a/0.png: over 178,956,970 pixels; allowed"),
    "64 MB of text": (
        lambda: (black_png(16, *(chunk(b"zTXt", b"%d" % i + TEXT) for i in range(63))), {}),
        "damaged image",
    ),
    "GIF that clears 3.6 GB": (lambda: (gif_of_a_large_frame(), {}), "a/0.png: over 178,956,970 pixels; allowed"),
    "TIFF of 8 million strips": (
        lambda: (tiff_of_many_strips(8_000_000), {}),
        "a/0.png: over .* of header and metadata",
    ),
    "PNG of a million texts": (
        lambda: (black_png(16, *(chunk(b"tEXt", b"%d\0" % i) for i in range(1_000_000))), {}),
        "a/0.png: over .* of header and metadata",
    ),
}
CHILD = """
import sys
from pathlib import Path
from largebatch.sources.find import find_source
from largebatch.util import UserError
from PIL import GifImagePlugin, PngImagePlugin, TiffImagePlugin
if sys.argv[1:]:
    try:
        source = find_source("x", path=sys.argv[1])
        with source.open() as read:
            read(range(len(source.ids)))
    except UserError as error:
        print(error)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def run_child(*arguments) -> tuple[str, int]:
    """What a loading process prints, and its peak memory in kB.

    VmHWM, since `ru_maxrss` of a child begins at its parent's.
    """
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr == ""
    *text, peak = result.stdout.splitlines()
    return "\n".join(text), int(peak)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_little_memory_and_gives_one_line(tmp_path, name):
    make, message = BOMBS[name]
    content, entry = make()
    path = write_zip(tmp_path / "set.zip", content, **entry)
    assert path.stat().st_size < 2**26
    text, peak = run_child(path)
    idle = run_child()[1]
    assert len(text.splitlines()) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(text)
    assert peak - idle < 400_000


# As a script does, where the test suite makes errors of warnings.
quiet_pillow = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")


@quiet_pillow
@pytest.mark.parametrize("pack", ["folder", "zip"])
def test_the_cap_on_pixels_holds_in_both_directions(tmp_path, pack):
    path = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    if pack == "zip":
        path = write_zip(tmp_path / "set.zip", (path / "a" / "a_0.png").read_bytes())
    for low, found in ((255, "256 pixels"), (100, "over 200 pixels")):
        with pytest.raises(
            UserError, match=rf"\.png: ({found}|[\d,]+ bytes); allowed: up to .*dataset.max_image_pixels"
        ):
            decode_all(find_source("x", path=str(path), max_image_pixels=low))
    dataset = decode_all(find_source("x", path=str(path), max_image_pixels=256))
    assert dataset.images.shape[1:] == (16, 16, 3)


@quiet_pillow
def test_the_cap_on_pixels_names_them(tmp_path):
    """Small files, so that only their pixels are too many; Pillow's own limit is not in the way."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(black_png(64))
    for low, found in ((4095, "4,096 pixels"), (100, "over 200 pixels")):
        with pytest.raises(
            UserError, match=rf"a/0.png: {found}; allowed: up to {low:,}, or a larger dataset.max_image"
        ):
            decode_all(find_source("x", path=str(tmp_path / "images"), max_image_pixels=low))
    for high in (4096, 10**12):
        source = find_source("x", path=str(tmp_path / "images"), max_image_pixels=high)
        assert decode_all(source).images.max() == 0


def test_the_cap_on_bytes_holds_in_both_directions(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    with (folder / "a" / "a_3.png").open("ab") as file:
        file.truncate(1025)
    for read in (
        lambda cap: decode_all(find_source("x", path=str(folder), max_image_pixels=cap)),
        lambda cap: find_images(str(folder), ["a", "b"], SQUARE, cap),
    ):
        with pytest.raises(
            UserError, match=r"a/a_3.png: 1,025 bytes; allowed: up to 1,024, or a larger dataset.max_im"
        ):
            read(256)
        assert len(read(257).labels) == 12


def test_an_entry_of_a_tfds_set_is_held_to_the_cap(tmp_path):
    from test_sources import png, write_prepared_tfds

    rows = [(png((16, 16), seed=i), i % 2, f"{i}.png") for i in range(12)]
    write_prepared_tfds(tmp_path, "tiny", rows, ["a", "b"])
    with pytest.raises(UserError, match=r"\.png: .*; allowed: up to .*dataset.max_image_pixels"):
        decode_all(find_source("tiny", path=str(tmp_path), max_image_pixels=100))
    assert len(decode_all(find_source("tiny", path=str(tmp_path), max_image_pixels=256)).labels) == 12


def test_the_cap_does_not_change_the_fingerprint(tmp_path):
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6})
    one, other = (find_source("x", path=str(folder), max_image_pixels=cap) for cap in (256, 10**9))
    assert one.fingerprint == other.fingerprint


def test_the_default_is_the_one_of_the_config():
    assert default.get_config().dataset.max_image_pixels == images.MAX_IMAGE_PIXELS == 89_478_485


def test_threads_share_the_room():
    """Who wants more than is left waits until it is given back; who wants less does not."""
    room, got = images.Room(10), {amount: threading.Event() for amount in (3, 4)}

    def work(amount):
        with room.taken(amount):
            got[amount].set()

    threads = [threading.Thread(target=work, args=(amount,)) for amount in got]
    with room.taken(7):
        for thread in threads:
            thread.start()
        assert got[3].wait(30)
        assert not got[4].wait(0.2)
    assert got[4].wait(30)
    for thread in threads:
        thread.join(30)


def test_little_is_not_counted():
    room = images.Room(10_000)
    with room.taken(10_000), room.taken(9):  # does not wait for ever
        pass


def test_every_image_takes_its_room(monkeypatch):
    taken = []

    class Counted(images.Room):
        def taken(self, amount):
            taken.append(amount)
            return super().taken(amount)

    monkeypatch.setattr(images, "Room", Counted)
    content = black_png(64)
    files = [images.ImageFile(f"a/{i}.png", 0, len(content), lambda: content) for i in range(5)]
    images.decode_dataset(files, [], images.DecodeOptions((8, 8)), 4096)
    assert sorted(taken) == [len(content)] * 6 + [64 * 64] * 6  # the first one twice, for its shape


def test_a_failed_read_gives_its_room_back(tmp_path):
    room = images.Room(10)
    with pytest.raises(ValueError, match="x"), room.taken(10):
        raise ValueError("x")
    with room.taken(10):
        pass


def test_images_that_no_memory_holds_are_one_line(tmp_path, monkeypatch):
    files = [images.ImageFile(f"a/{i}.png", 0, len(black_png(16)), lambda: black_png(16)) for i in range(3)]

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(UserError, match=r"dataset.image_size: 3 images of 16x16 pixels.* do not fit"):
        images.decode_dataset(files, [], images.DecodeOptions(), 10_000)


def test_what_is_no_picture_says_what_is():
    file = images.ImageFile("a/0.png", 0, 5, lambda: b"hello")
    with pytest.raises(UserError, match=r"a/0.png: damaged image \(no JPEG, PNG, TIFF, GIF, BMP or WebP\)"):
        images.decode_dataset([file], [], images.DecodeOptions(), 10_000)


def test_other_kinds_of_picture_under_a_usual_name_are_read():
    """Web data sets hold GIF, BMP and WebP files that are named .jpg."""
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8))
    for kind in ("GIF", "BMP", "WEBP", "JPEG", "TIFF", "PNG"):
        buffer = io.BytesIO()
        pixels.save(buffer, kind)
        file = images.ImageFile("a/0.jpg", 0, len(buffer.getvalue()), buffer.getvalue)
        assert images.decode_dataset([file], [], images.DecodeOptions(), 1000).images.shape == (1, 16, 16, 3), (
            json.dumps(kind)
        )


def test_pillows_own_limit_is_put_back():
    before = Image.MAX_IMAGE_PIXELS
    files = [images.ImageFile("a/0.png", 0, len(black_png(8)), lambda: black_png(8))]
    images.decode_dataset(files, [], images.DecodeOptions(), 64)
    assert before == Image.MAX_IMAGE_PIXELS
    with pytest.raises(UserError):
        images.decode_dataset(files, [], images.DecodeOptions(), 63)
    assert before == Image.MAX_IMAGE_PIXELS


def test_a_script_under_an_images_name_is_not_run():
    """Pillow would start Ghostscript."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    file = images.ImageFile("a/0.png", 0, len(script), lambda: script)
    with pytest.raises(UserError, match=r"a/0.png: damaged image \(no JPEG, PNG"):
        images.decode_dataset([file], [], images.DecodeOptions(), 10_000)

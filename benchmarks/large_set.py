"""Building the cache of a set that would not fit into memory: how fast beside plain decoding, in how much memory.

The images are made up, and removed at the end.
"""

import concurrent.futures
import functools
import io
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import augment
from benchmarks.inputs import in_new_process, make_config
from largebatch.data.cache_images import estimate_build
from largebatch.hosts.start import start_jax
from largebatch.runs.summary import git_commit, versions

SIDE = 96  # pixels
CLASSES = 10
IMAGES_PER_TASK = 1000  # that one process makes or decodes at a time
DECODED_SAMPLE = 40_000  # images of which plain decoding is timed
SAMPLE_SEC = 0.1
CANVAS_SIDE = 1024


def bench_build(num_images: int, folder: str | None = None, repeats: int = 3) -> dict:
    """Makes a zip of JPEGs, times plain decoding of a part of it and the build of a cache of all of it.

    Args:
      folder: where the zip and the cache are put for the time being.
      repeats: of plain decoding, of which half come before the build and half after it.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path, cache_dir = str(Path(place) / "images.zip"), str(Path(place) / "cache")
        write_jpegs(path, num_images)
        rates = [plain_decoding_rate(path) for _ in range(repeats)]
        estimated = in_new_process(estimate, path, cache_dir)
        built = in_new_process(build, path, cache_dir)
        rates += [plain_decoding_rate(path) for _ in range(repeats)]
    rate = num_images / built.seconds
    return {
        "command": "build",
        "images": num_images,
        "decoded_bytes": num_images * SIDE * SIDE * 3,
        "plain_images_per_sec": rates,
        "estimated_build_seconds": estimated,
        "build_seconds": built.seconds,
        "build_images_per_sec": rate,
        "ratio": rate / statistics.median(rates),
        "peak_anonymous_bytes": built.peak_anonymous_bytes,
        "cores": os.cpu_count(),
        "versions": versions(),
        "git_commit": git_commit(),
    }


def print_build(result: dict) -> None:
    """The figures as lines."""
    rates = result["plain_images_per_sec"]
    print(f"{result['images']:,} images, {result['decoded_bytes'] / 1e9:.1f} GB decoded")
    print(f"plain decoding      {statistics.median(rates):,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f})")
    print(
        f"decode and cache    {result['build_images_per_sec']:,.0f} images/s in {result['build_seconds']:,.0f} s: "
        f"{result['ratio']:.2f} of plain decoding"
    )
    print(f"the doctor said     {result['estimated_build_seconds']:,.0f} s")
    print(f"anonymous memory    {result['peak_anonymous_bytes'] / 1e9:.2f} GB at most")


# ---- the images -------------------------------------------------------------------------------------


def write_jpegs(path: str, num_images: int) -> None:
    """Writes a zip of class folders with `num_images` JPEGs of SIDE x SIDE pixels, none like another."""
    tasks = range(0, num_images, IMAGES_PER_TASK)
    make = functools.partial(_make_jpegs, num_images)
    with _processes() as pool, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for first, encoded in zip(tasks, pool.map(make, tasks), strict=True):
            for number, content in enumerate(encoded, first):
                archive.writestr(f"class_{number % CLASSES}/{number:07d}.jpg", content)


def _make_jpegs(num_images: int, first: int) -> list[bytes]:
    """Cuts from a smooth random canvas of the image's class, each at its own place, contrast and brightness."""
    encoded = []
    for number in range(first, min(first + IMAGES_PER_TASK, num_images)):
        rng = np.random.default_rng(number)
        canvas = _canvas(number % CLASSES)
        row, column = rng.integers(0, CANVAS_SIDE - SIDE, 2)
        cut = canvas[row : row + SIDE, column : column + SIDE]
        pixels = cut * rng.uniform(0.5, 1.0) + rng.uniform(0, 60) + rng.normal(0, 4, (SIDE, SIDE, 1))
        buffer = io.BytesIO()
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    return encoded


@functools.cache
def _canvas(label: int) -> np.ndarray:
    """Noise of a roughness that tells the class, float32 [CANVAS_SIDE, CANVAS_SIDE, 3] in 0..255."""
    rng = np.random.default_rng(label)
    small = rng.integers(0, 256, (CANVAS_SIDE // (2 + 2 * label),) * 2 + (3,), np.uint8)
    return np.asarray(
        Image.fromarray(small).resize((CANVAS_SIDE, CANVAS_SIDE), Image.Resampling.BICUBIC), np.float32
    )


def _processes() -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


# ---- what is timed ----------------------------------------------------------------------------------


def plain_decoding_rate(path: str) -> float:
    """Images a second that Pillow alone decodes on all cores, each core in a process of its own."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()[:DECODED_SAMPLE]
        encoded = [archive.read(name) for name in names]
    parts = [encoded[i : i + IMAGES_PER_TASK] for i in range(0, len(encoded), IMAGES_PER_TASK)]
    with _processes() as pool:
        list(pool.map(len, parts[: os.cpu_count()]))  # starts the processes
        begin = time.perf_counter()
        decoded = sum(pool.map(_decode_all, parts))
        seconds = time.perf_counter() - begin
    assert decoded == len(encoded)
    return decoded / seconds


def _decode_all(encoded: list[bytes]) -> int:
    for content in encoded:
        np.asarray(Image.open(io.BytesIO(content)))
    return len(encoded)


@dataclass(frozen=True)
class Built:
    """What the build of a cache took."""

    seconds: float
    peak_anonymous_bytes: int  # memory of the process that no file backs


def make_large_config(path: str, cache_dir: str):
    """Return the config of a set whose images are stored as they are."""
    return make_config(path, cache_dir).replace(dataset={"name": "large"}, augment={"storage": "on_device"})


def estimate(path: str, cache_dir: str) -> float:
    """Seconds that train.py --doctor says the build will take, once the zip is listed."""
    start_jax()
    return estimate_build(augment.plan_cache(make_large_config(path, cache_dir))).seconds


def build(path: str, cache_dir: str) -> Built:
    """Builds the cache of a zip as train.py does."""
    start_jax()
    config = make_large_config(path, cache_dir)
    peak, done = [anonymous_bytes()], threading.Event()

    def sample():
        while not done.wait(SAMPLE_SEC):
            peak[0] = max(peak[0], anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    augment.prepare_cache(config)
    seconds = time.perf_counter() - begin
    done.set()
    sampler.join()
    return Built(seconds, peak[0])


def anonymous_bytes() -> int:
    """RssAnon of this process: resident memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")

"""A build of 50,000 JPEGs that is killed 10 times ends with the same bytes, and does little work twice."""

import io
import json
import random
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from conftest import ROOT, on_devices
from faults.figures import record
from PIL import Image

NUM_IMAGES, KILLS = 50_000, 10
MOST_TWICE = 0.05  # of the images, for each kill

# Builds the cache of a zip in CACHE_DIR, and notes in LOG how many images each block has that is decoded.
CHILD = """
import sys
import augment
import model
from configs import default
from largebatch.config import rules
from largebatch.data import cache_images
from largebatch.hosts.start import start_jax

path, cache_dir, log = sys.argv[1:]
start_jax()
decode = cache_images.decode_block

def counted(plan, rows):
    block = decode(plan, rows)
    with open(log, "a") as file:
        file.write(f"{len(rows)}\\n")
    return block

cache_images.decode_block = counted
config = default.get_config()
config.dataset.name, config.dataset.path, config.augment.cache_dir = "large", path, cache_dir
augment.prepare_cache(rules.check(config.to_dict(), model.MODELS))
"""


def write_jpegs(path) -> None:
    """Write a zip of class folders with NUM_IMAGES random JPEGs of 96 pixels."""
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for number in range(NUM_IMAGES):
            coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
            buffer = io.BytesIO()
            coarse.resize((96, 96), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            archive.writestr(f"class_{number % 10}/{number:07d}.jpg", buffer.getvalue())


def start_build(path, cache_dir, log) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(path), str(cache_dir), str(log)]
    return subprocess.Popen(command, cwd=ROOT, env=on_devices(1), stderr=subprocess.DEVNULL)


def decoded(log) -> int:
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def content_of(cache_dir) -> dict:
    """What the only cache of a folder holds but for what is different in each build."""
    (folder,) = (path for path in cache_dir.iterdir() if not path.name.startswith("."))
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(content.pop("manifest.json"))
    for name in ("build", "built", "manifest_sha256"):
        del manifest[name]
    return content | {"manifest.json": manifest}


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_build_that_is_killed_ten_times_ends_with_the_same_bytes(tmp_path):
    path, log, rng = tmp_path / "images.zip", tmp_path / "log", random.Random(0)
    write_jpegs(path)
    assert start_build(path, tmp_path / "whole", tmp_path / "log of whole").wait() == 0
    for kill in range(KILLS):
        process, before = start_build(path, tmp_path / "killed", log), decoded(log)
        enough = before + rng.uniform(0.02, 0.12) * NUM_IMAGES
        while decoded(log) < enough:
            assert process.poll() is None, f"the build ended before kill {kill}"
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert start_build(path, tmp_path / "killed", log).wait() == 0
    twice = decoded(log) - NUM_IMAGES
    record("build_kills", {"images": NUM_IMAGES, "kills": KILLS, "decoded_twice": twice})
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")
    assert twice / KILLS <= MOST_TWICE * NUM_IMAGES

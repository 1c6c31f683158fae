"""Building a cache: what it holds, how little memory it takes, and that it resumes after whatever stopped it."""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, on_devices

from largebatch.data import cache as caches
from largebatch.data import cache_build
from largebatch.data.cache import MANIFEST, DamagedCache, discard_cache, open_cache
from largebatch.data.cache_build import (
    CachePlan,
    build_files,
    channel_statistics,
    channel_sums,
    finish_cache,
)
from largebatch.data.dataset import SPLITS, dataset_of_files
from largebatch.doctor import check_build
from largebatch.util import UserError


def cut(count: int) -> dict[str, np.ndarray]:
    """Splits of 80, 10 and 10 percent."""
    parts = np.split(np.random.default_rng(0).permutation(count), [count * 8 // 10, count * 9 // 10])
    return dict(zip(SPLITS, parts, strict=True))


def plan_of(images, folder: Path, decode=None) -> CachePlan:
    """The plan of a cache of images with the ids 00, 01, ..."""
    ids = [f"{number:02d}" for number in range(len(images))]
    decode = decode or (lambda examples: [images[example] for example in examples])
    dataset = dataset_of_files("noise", ids, np.arange(len(images)) % 2, ["a", "b"], decode)
    return CachePlan(folder / "x-0", dataset, cut(len(images)))


def build_cache(plan: CachePlan) -> caches.Cache:
    """The cache, built by this process alone."""
    build_files(plan)
    finish_cache(plan)
    return open_cache(plan.folder)


def noise(num: int, dtype=np.uint8, shape=(8, 6, 3)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (num, *shape), dtype, endpoint=True)


def content_of(folder) -> dict:
    """Return the files of a cache, without what differs from build to build."""
    content = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    manifest = json.loads(content.pop(MANIFEST))
    for name in ("build", "built", "manifest_sha256"):
        del manifest[name]
    return content | {MANIFEST: manifest}


@pytest.fixture
def small_files(monkeypatch):
    """Several images files for a few images, and several blocks in each."""
    monkeypatch.setattr(caches, "MIN_FILE_BYTES", 6 * 8 * 6 * 3)
    monkeypatch.setattr(cache_build, "BLOCK_BYTES", 2 * 8 * 6 * 3)


# ---- what a cache holds -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_cache_holds_every_image_in_the_order_of_its_split(tmp_path, dtype):
    pixels = noise(50, dtype, (8, 6, 5))
    plan = plan_of(pixels, tmp_path)
    cache = build_cache(plan)
    cache.verify()
    files = sorted(plan.folder.glob("images-*.raw"))
    assert len(files) > 4
    for split in SPLITS:
        examples, dataset = plan.splits[split], cache.split(split)
        np.testing.assert_array_equal(dataset.images(np.arange(len(examples))), pixels[examples])
        np.testing.assert_array_equal(dataset.images(np.array([1, 0, 1])), pixels[examples[[1, 0, 1]]])
        assert dataset.ids.tolist() == [f"{example:02d}" for example in examples]
        np.testing.assert_array_equal(dataset.labels, examples % 2)
    # The files are what NumPy reads, too.
    whole = np.concatenate([np.fromfile(path, dtype).reshape(-1, 8, 6, 5) for path in files])
    np.testing.assert_array_equal(whole, pixels[np.concatenate([plan.splits[split] for split in SPLITS])])
    train = pixels[plan.splits["train"]].astype(float)
    np.testing.assert_allclose(cache.manifest["mean"], train.mean((0, 1, 2)))
    np.testing.assert_allclose(cache.manifest["std"], train.std((0, 1, 2)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_channel_sums_are_exact(dtype):
    pixels, largest, num_lines = noise(40, dtype, (5, 7, 3)), int(np.iinfo(dtype).max), 2**17
    wide = pixels.astype(object)  # Python's integers
    assert channel_sums(pixels) == [*wide.sum((0, 1, 2)), *(wide**2).sum((0, 1, 2))]
    assert channel_sums(pixels[:0]) == [0] * 6
    sums = channel_sums(np.full((1, num_lines, 2, 3), largest, dtype))
    assert sums == [2 * num_lines * largest] * 3 + [2 * num_lines * largest**2] * 3
    assert channel_statistics(sums, 2 * num_lines) == ([largest] * 3, [1.0] * 3)  # 1 at least


@pytest.mark.parametrize("is_crc_equal", [False, True])
def test_equal_images_are_counted_and_named(tmp_path, caplog, monkeypatch, is_crc_equal):
    if is_crc_equal:
        monkeypatch.setattr("zlib.crc32", lambda row: 7)
    pixels, train, val = noise(30), cut(30)["train"], cut(30)["val"]
    build_cache(plan_of(pixels, tmp_path / "none"))
    assert "same pixels" not in caplog.text
    pixels[train[1]] = pixels[train[0]]
    build_cache(plan_of(pixels, tmp_path / "one"))
    assert "images with the same pixels as another one: 1, in another split: 0" in caplog.text
    assert f"({train[0]:02d} = {train[1]:02d})" in caplog.text
    pixels[val[0]] = pixels[train[2]]
    build_cache(plan_of(pixels, tmp_path / "two"))
    assert "images with the same pixels as another one: 2, in another split: 1" in caplog.text
    assert f"({train[2]:02d} = {val[0]:02d})" in caplog.text


# ---- builds in processes of their own ------------------------------------------------------------------

# Builds the cache of NUM images of SIZE pixels in FOLDER, in files of ROWS, and notes in LOG what it decodes, in
# SECONDS each; writing a block takes WAIT. Prints how much memory of its own it took at most, in kB.
CHILD = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from largebatch.data import cache, cache_build
from largebatch.data.dataset import dataset_of_files

folder, log = map(Path, sys.argv[1:3])
num, size, rows = map(int, sys.argv[3:6])
seconds, wait = map(float, sys.argv[6:])
cache.MIN_FILE_BYTES, cache.MOST_FILES = rows * size * size * 3, 10**6
cache_build.BLOCK_BYTES = min(cache_build.BLOCK_BYTES, cache.MIN_FILE_BYTES // 2)
os.cpu_count = lambda: 2  # blocks wait for each thread
file, in_order, peak = log.open("a"), cache_build._in_order, 0

def decode(indices):
    for index in indices:
        time.sleep(seconds)
        file.write(f"{index}\\n")
        file.flush()
        yield np.random.default_rng(index).integers(0, 256, (size, size, 3), np.uint8)

def slowly(*arguments, **options):
    for block in in_order(*arguments, **options):
        time.sleep(wait)
        yield block

def memory():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while True:
        peak = max(peak, memory())
        time.sleep(0.005)

cache_build._in_order = slowly
ids = [f"{number:06d}" for number in range(num)]
numbers = dataset_of_files("numbers", ids, np.arange(num) % 2, ["a", "b"], decode)
splits = dict(zip(("train", "val", "test"), np.split(np.arange(num), [num * 8 // 10, num * 9 // 10])))
plan = cache_build.CachePlan(folder, numbers, splits)
before = memory()
threading.Thread(target=watch, daemon=True).start()
cache_build.build_files(plan)
cache_build.finish_cache(plan)
print(peak - before)
"""


def start_child(folder: Path, log: Path, num=120, size=8, rows=6, seconds=0.0, wait=0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, *map(str, (folder, log, num, size, rows, seconds, wait))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=on_devices(1), **pipes)


def finished(child: subprocess.Popen) -> int:
    """Wait for a child, and return the memory that it took, in kB."""
    printed, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return int(printed)


@pytest.mark.timeout(120)
def test_a_build_that_is_killed_resumes_and_ends_with_the_same_bytes(tmp_path):
    finished(start_child(tmp_path / "whole" / "x-0", tmp_path / "log"))
    folder, log = tmp_path / "killed" / "x-0", tmp_path / "decoded"
    unfinished, rng, whole_before = folder.parent / ".x-0.build", random.Random(0), set()
    for _ in range(3):
        log.write_text("")
        child, enough = start_child(folder, log, seconds=0.01), rng.randrange(10, 45)
        while child.poll() is None and log.read_text().count("\n") < enough:
            time.sleep(0.01)
        child.kill()
        child.communicate()
        assert child.returncode < 0
        assert {int(line) for line in log.read_text().split()} & whole_before <= {0}  # which tells the size
        for path in unfinished.glob("images-*.raw"):
            number = int(re.fullmatch(r"images-(\d+).raw", path.name)[1])
            whole_before |= set(range(6 * number, 6 * number + 6))
        assert not folder.exists()
    assert whole_before
    (unfinished / f".images-00000.raw.{'0' * 32}.tmp").write_bytes(b"")  # as a kill may leave
    log.write_text("")
    finished(start_child(folder, log))
    assert {int(line) for line in log.read_text().split()} & whole_before <= {0}
    assert content_of(folder) == content_of(tmp_path / "whole" / "x-0")
    assert [path.name for path in folder.parent.iterdir()] == ["x-0"]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(120)
def test_memory_while_building_does_not_grow_with_the_images(tmp_path):
    """Decoding is faster than writing; 3,000 images are 83 MB."""
    options = {"log": tmp_path / "log", "size": 96, "rows": 75, "wait": 0.05}
    few, many = (finished(start_child(tmp_path / f"x-{num}", num=num, **options)) for num in (750, 3000))
    assert many < 40_000
    assert many < few + 20_000


# ---- builds that fail or meet another one --------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
def test_a_failing_disk_says_what_is_kept_and_the_next_start_resumes(tmp_path, monkeypatch):
    plan, write = plan_of(noise(50), tmp_path), cache_build._write_file

    def fail(plan, number, *rest) -> None:
        if number == 2:
            raise OSError(28, "No space left on device")
        write(plan, number, *rest)

    monkeypatch.setattr(cache_build, "_write_file", fail)
    with pytest.raises(UserError, match=r"No space left on device\); 2 of 9 files are kept in .*start again"):
        build_files(plan)
    kept = {path: path.stat().st_mtime_ns for path in map(plan.images_path, range(2))}
    monkeypatch.undo()
    build_files(plan)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    build_cache(plan).verify()


@pytest.mark.usefixtures("small_files")
def test_too_little_room_for_what_is_missing_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    plan, usage = plan_of(noise(50), tmp_path), shutil.disk_usage(tmp_path)
    build_files(plan)
    needed = len(plan.layout.rows_of_file(2)) * plan.layout.row_bytes
    plan.images_path(2).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with monkeypatch.context() as patch:
        patch.setattr(cache_build, "_write_files", lambda *_: pytest.fail("decoded"))
        with pytest.raises(UserError, match=r"augment\.cache_dir: .* has 0\.00 GB free; the cache needs 0\.00 GB"):
            build_files(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    build_cache(plan).verify()


def test_nothing_is_left_of_a_build_that_ends_at_its_first_block(tmp_path):
    images = [*noise(5), np.zeros((12, 8, 3), np.uint8), *noise(14)]
    with pytest.raises(UserError, match=r"dataset: 05 has 8x12 pixels of 3 .*, 00 has 6x8 .*dataset.image_size to"):
        build_cache(plan_of(images, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_files")
def test_a_process_that_comes_second_takes_the_cache_that_is_there(tmp_path, monkeypatch):
    plan, write = plan_of(noise(50), tmp_path), cache_build._write_file

    def write_with_company(plan, number, *rest) -> None:
        if number == 2:
            monkeypatch.undo()
            build_cache(plan)
        write(plan, number, *rest)

    monkeypatch.setattr(cache_build, "_write_file", write_with_company)
    cache = build_cache(plan)
    cache.verify()
    assert [path.name for path in tmp_path.iterdir()] == [plan.folder.name]
    assert build_cache(plan).manifest == cache.manifest  # nothing to do


def test_a_cache_that_another_process_built_again_stays(tmp_path):
    plan, damage = plan_of(noise(30), tmp_path), DamagedCache("bad")
    mine = build_cache(plan)
    shutil.rmtree(plan.folder)
    build_cache(plan)  # by another process, which found the damage, too
    discard_cache(mine, damage)
    discard_cache(open_cache(plan.folder), damage)
    assert not plan.folder.exists()
    discard_cache(mine, damage)  # which is gone


def test_a_damaged_part_record_is_named_and_its_images_are_decoded_again(tmp_path):
    plan = plan_of(noise(80), tmp_path / "caches")
    build_files(plan)
    record = plan.record_path(0)
    record.write_bytes(b"")  # as a power failure may leave it
    with pytest.raises(UserError, match=rf"^augment\.cache_dir: {record} was damaged and is removed; start again"):
        finish_cache(plan)
    build_cache(plan)
    open_cache(plan.folder)


# ---- an estimate ---------------------------------------------------------------------------------------


def test_the_doctor_compares_the_size_of_a_build_with_the_disk(tmp_path, monkeypatch):
    plan = plan_of(noise(80, shape=(32, 48, 3)), tmp_path / "caches")
    finding = check_build(plan)
    assert not plan.folder.parent.exists()  # nothing was written
    assert finding.status == "ok"
    assert finding.text.startswith("80 images of 32x48x3 uint8: 0.00 GB on disk; ")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=plan.disk_bytes - 1))
    assert check_build(plan).status == "fail"
    monkeypatch.undo()
    build_cache(plan)
    on_disk = sum(path.stat().st_size for path in plan.folder.iterdir())
    assert on_disk == pytest.approx(plan.disk_bytes, rel=0.25)

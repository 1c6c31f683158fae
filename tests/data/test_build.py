"""Building a cache: what it holds, how little memory it takes, and that it goes on after whatever stopped it."""

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, on_devices
from etils import epath

from largebatch.data import cache as caches
from largebatch.data import cache_images
from largebatch.data.cache import MANIFEST, DamagedCache, open_cache
from largebatch.data.cache_build import build_together, channel_statistics, finish_cache
from largebatch.data.cache_images import CachePlan, build_files, channel_sums
from largebatch.data.dataset import SPLITS, dataset_of_arrays, dataset_of_files
from largebatch.hosts import collectives
from largebatch.util import UserError

# A child that builds the cache of NUM images of SIZE pixels in FOLDER, in files of ROWS, and notes in LOG what it
# decodes, SECONDS for each; writing a block takes WAIT. It prints how much memory of its own it took at most.
CHILD = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from etils import epath
from largebatch.data import cache, cache_images
from largebatch.data.cache_build import finish_cache
from largebatch.data.dataset import dataset_of_files

folder, log = sys.argv[1:3]
num, size, rows = map(int, sys.argv[3:6])
seconds, wait = map(float, sys.argv[6:])
cache.MIN_FILE_BYTES = rows * size * size * 3
cache.MOST_FILES = 10**6
cache_images.BLOCK_BYTES = min(cache_images.BLOCK_BYTES, cache.MIN_FILE_BYTES // 2)
file = open(log, "a")

def decode(indices, out=None):
    for index in indices:
        time.sleep(seconds)
        file.write(f"{index}\\n")
        file.flush()
    return [np.random.default_rng(index).integers(0, 256, (size, size, 3), np.uint8) for index in indices]

ids = [f"{number:06d}" for number in range(num)]
numbers = dataset_of_files("numbers", ids, np.arange(num) % 2, ["a", "b"], decode)
splits = dict(zip(("train", "val", "test"), np.split(np.arange(num), [num * 8 // 10, num * 9 // 10])))
plan = cache_images.CachePlan(epath.Path(folder), numbers, splits)
peak = 0
in_order = cache_images._in_order
os.cpu_count = lambda: 2  # blocks wait for each thread

def slowly(*arguments, **options):
    for block in in_order(*arguments, **options):
        time.sleep(wait)
        yield block

cache_images._in_order = slowly

def memory():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while True:
        peak = max(peak, memory())
        time.sleep(0.005)

before = memory()
threading.Thread(target=watch, daemon=True).start()
cache_images.build_files(plan)
finish_cache(plan)
print(peak - before)
"""


def child_command(folder: Path, log: Path, num=120, size=8, rows=6, seconds=0.0, wait=0.0) -> list[str]:
    return [sys.executable, "-c", CHILD, *map(str, (folder, log, num, size, rows, seconds, wait))]


def run_child(*arguments, **options) -> int:
    """What it took of memory, in kB."""
    command = child_command(*arguments, **options)
    result = subprocess.run(command, cwd=ROOT, env=on_devices(1), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def content_of(folder) -> dict:
    """What a cache holds but for what is different in each build."""
    content = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    manifest = json.loads(content.pop(MANIFEST))
    for name in ("build", "built", "manifest_sha256"):
        del manifest[name]
    return content | {MANIFEST: manifest}


def cut(count: int) -> dict[str, np.ndarray]:
    """Splits of 80, 10 and 10 percent."""
    parts = np.split(np.random.default_rng(0).permutation(count), [count * 8 // 10, count * 9 // 10])
    return dict(zip(SPLITS, parts, strict=True))


def plan_of(pixels: np.ndarray, folder) -> CachePlan:
    """Images with the ids 00, 01, ..."""
    ids, labels = [f"{number:02d}" for number in range(len(pixels))], np.arange(len(pixels), dtype=np.int32) % 2
    dataset = dataset_of_arrays(pixels, labels, ["a", "b"], ids)
    return CachePlan(epath.Path(folder) / "x-0123456789ab-0123456789ab", dataset, cut(len(pixels)))


def build_cache(plan: CachePlan) -> caches.Cache:
    """The cache, built by this process alone."""
    build_files(plan)
    finish_cache(plan)
    return open_cache(plan.folder)


def noise(num: int, dtype=np.uint8, shape=(8, 6, 3)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (num, *shape), dtype, endpoint=True)


@pytest.fixture
def small_files(monkeypatch):
    """Several images files for a few images, and several blocks in each."""
    monkeypatch.setattr(caches, "MIN_FILE_BYTES", 6 * 8 * 6 * 3)
    monkeypatch.setattr(cache_images, "BLOCK_BYTES", 2 * 8 * 6 * 3)


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
def test_channel_sums_are_those_of_numpy(dtype):
    pixels = noise(40, dtype, (5, 7, 3))
    sums, square_sums = channel_sums(pixels)
    wide = pixels.astype(object)  # Python's integers
    assert sums == wide.sum((0, 1, 2)).tolist()
    assert square_sums == (wide**2).sum((0, 1, 2)).tolist()
    assert channel_sums(pixels[:0]) == ([0, 0, 0], [0, 0, 0])
    mean, std = channel_statistics(sums, square_sums, 40 * 5 * 7)
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(std, pixels.astype(float).std((0, 1, 2)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_channel_sums_of_the_largest_values_do_not_overflow(dtype):
    largest, num_lines = int(np.iinfo(dtype).max), 2**17  # above what is added at once
    sums, square_sums = channel_sums(np.full((1, num_lines, 2, 3), largest, dtype))
    assert sums == [2 * num_lines * largest] * 3
    assert square_sums == [2 * num_lines * largest**2] * 3
    assert channel_statistics(sums, square_sums, 2 * num_lines) == ([largest] * 3, [1.0] * 3)  # 1 at least


def test_equal_images_are_counted_and_named(tmp_path, caplog):
    pixels, splits = noise(30), cut(30)
    train, val = splits["train"], splits["val"]
    pixels[train[1]] = pixels[train[0]]
    build_cache(plan_of(pixels, tmp_path / "one"))
    assert "images with the same pixels as another one: 1, in another split: 0" in caplog.text
    assert f"({train[0]:02d} = {train[1]:02d})" in caplog.text
    caplog.clear()
    pixels[val[0]] = pixels[train[2]]
    build_cache(plan_of(pixels, tmp_path / "two"))
    assert "images with the same pixels as another one: 2, in another split: 1" in caplog.text
    assert f"({train[2]:02d} = {val[0]:02d})" in caplog.text
    caplog.clear()
    build_cache(plan_of(noise(30), tmp_path / "three"))
    assert "same pixels" not in caplog.text


def test_images_of_equal_crc_are_compared(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("zlib.crc32", lambda row: 7)
    pixels = noise(30)
    pixels[cut(30)["train"][5]] = pixels[cut(30)["train"][3]]
    build_cache(plan_of(pixels, tmp_path))
    assert "images with the same pixels as another one: 1, in another split: 0" in caplog.text


# ---- builds that are stopped ------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_build_that_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path):
    run_child(tmp_path / "whole" / "x-0", tmp_path / "log")
    folder, log = tmp_path / "killed" / "x-0", tmp_path / "decoded"
    unfinished, rng = folder.parent / ".x-0.build", random.Random(0)
    whole_before, kills = set(), 0
    for _ in range(3):
        log.write_text("")
        process = subprocess.Popen(
            child_command(folder, log, seconds=0.01), cwd=ROOT, env=on_devices(1), stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        enough = rng.randrange(10, 45)
        while process.poll() is None and log.read_text().count("\n") < enough:
            time.sleep(0.01)
        process.kill()
        kills += process.wait() < 0
        decoded = {int(line) for line in log.read_text().split()}
        assert decoded & whole_before <= {0}  # which tells the size
        for path in unfinished.glob("images-*.raw"):
            number = int(re.fullmatch(r"images-(\d+).raw", path.name)[1])
            whole_before |= set(range(6 * number, 6 * number + 6))
        assert not folder.exists()
    assert kills == 3
    assert whole_before
    (unfinished / f".images-00000.raw.{'0' * 32}.tmp").write_bytes(b"")  # as a kill may leave
    log.write_text("")
    run_child(folder, log)
    assert {int(line) for line in log.read_text().split()} & whole_before <= {0}
    assert content_of(folder) == content_of(tmp_path / "whole" / "x-0")
    assert [path.name for path in folder.parent.iterdir()] == ["x-0"]


@pytest.mark.timeout(120)
def test_two_processes_build_the_same_cache_at_once(tmp_path):
    folder = tmp_path / "caches" / "x-0"
    commands = [child_command(folder, tmp_path / f"log{number}", seconds=0.005) for number in range(2)]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(one, cwd=ROOT, env=on_devices(1), **options) for one in commands]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    open_cache(epath.Path(folder)).verify()
    assert [path.name for path in folder.parent.iterdir()] == ["x-0"]
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp" or path.is_dir()]


def wrap_writing(monkeypatch, act) -> None:
    """Call `act(number)` before the numbered call that writes an images file."""
    write, calls = cache_images._write_file, []

    def wrapped(*arguments):
        calls.append(arguments)
        act(len(calls))
        write(*arguments)

    monkeypatch.setattr(cache_images, "_write_file", wrapped)


@pytest.mark.usefixtures("small_files")
def test_a_process_that_comes_second_takes_the_cache_that_is_there(tmp_path, monkeypatch):
    plan = plan_of(noise(50), tmp_path)
    wrap_writing(monkeypatch, lambda number: build_cache(plan) if number == 3 else None)
    build_cache(plan).verify()
    assert [path.name for path in tmp_path.iterdir()] == [plan.folder.name]
    manifest = (plan.folder / MANIFEST).read_bytes()
    build_cache(plan)  # which finds nothing to do
    assert (plan.folder / MANIFEST).read_bytes() == manifest


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("damage", ["", "no JSON", "[]", '{"crcs": [1, 2]}'])
def test_a_damaged_part_record_is_named_and_the_next_start_decodes_that_part_again(tmp_path, damage):
    plan = plan_of(noise(50), tmp_path)
    build_files(plan)
    plan.record_path(1).write_text(damage)
    with pytest.raises(UserError, match=rf"augment\.cache_dir: {plan.record_path(1)} is damaged .*start again"):
        finish_cache(plan)
    build_cache(plan).verify()


@pytest.mark.usefixtures("small_files")
def test_a_failing_disk_says_what_is_kept_and_the_next_start_goes_on(tmp_path, monkeypatch):
    plan = plan_of(noise(50), tmp_path)

    def fail(number: int) -> None:
        if number == 3:
            raise OSError(28, "No space left on device")

    wrap_writing(monkeypatch, fail)
    with pytest.raises(UserError, match=r"No space left on device\); 2 of 9 files are kept in .*start again"):
        build_files(plan)
    assert not list(plan.build_folder.glob(".*.tmp"))
    kept = {path: path.stat().st_mtime_ns for path in map(Path, map(plan.images_path, range(2)))}
    build_files(plan)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    build_cache(plan).verify()


def test_a_file_that_a_full_disk_cuts_off_is_removed(tmp_path):
    plan = plan_of(noise(200), tmp_path)  # a block of more bytes than a file buffers
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # what is buffered cannot be written at the close either
    try:
        with pytest.raises(UserError, match=r"cannot write .*File too large"):
            build_files(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    build_cache(plan).verify()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(120)
def test_memory_while_building_does_not_grow_with_the_images(tmp_path):
    """Decoding is faster than writing; 3,000 images are 83 MB."""
    log, options = tmp_path / "log", {"size": 96, "rows": 75, "wait": 0.05}
    few, many = (run_child(tmp_path / f"x-{num}", log, num=num, **options) for num in (750, 3000))
    assert many < 40_000
    assert many < few + 20_000


def test_too_little_room_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    plan, usage, needed = plan_of(noise(50), tmp_path), shutil.disk_usage(tmp_path), 50 * 8 * 6 * 3
    monkeypatch.setattr(cache_images, "_write_files", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"augment\.cache_dir: .* has 0\.00 GB free; the cache needs 0\.00 GB more"):
        build_files(plan)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    build_cache(plan)


@pytest.mark.usefixtures("small_files")
def test_a_build_that_resumes_needs_room_for_what_is_missing(tmp_path, monkeypatch):
    plan, usage = plan_of(noise(50), tmp_path), shutil.disk_usage(tmp_path)
    build_files(plan)
    row_bytes, rows = plan.layout.row_bytes, len(plan.layout.rows_of_file(2))
    plan.images_path(2).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=rows * row_bytes - 1))
    with pytest.raises(UserError, match="make room"):
        build_files(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=rows * row_bytes))
    build_cache(plan).verify()


def test_nothing_is_left_of_a_build_that_ends_at_its_first_block(tmp_path):
    images = [*noise(5), np.zeros((12, 8, 3), np.uint8), *noise(14)]
    ids = [f"{number:02d}" for number in range(20)]
    dataset = dataset_of_files("x", ids, np.arange(20) % 2, ["a", "b"], lambda some, out: [images[i] for i in some])
    plan = CachePlan(epath.Path(tmp_path) / "x-0-0", dataset, cut(20))
    with pytest.raises(UserError, match=r"dataset\.image_size: 05 is 8x12 pixels, 00 is 6x8; set a size"):
        build_cache(plan)
    assert not list(tmp_path.iterdir())


def test_pixels_that_cannot_be_stored_are_refused():
    dataset = dataset_of_files("x", ["00"], [0], ["a"], lambda some, out: [np.zeros((4, 4, 3), np.float32)])
    with pytest.raises(UserError, match=r"dataset: 00 has float32 pixels; allowed: uint8 \| uint16"):
        _ = dataset.image_shape


def test_an_image_that_is_in_no_split_is_not_decoded(tmp_path):
    def decode(some, out):
        assert 0 not in some
        return [IMAGES[number] for number in some]

    ids = [f"{number:02d}" for number in range(21)]
    dataset = dataset_of_files("x", ids, np.arange(21) % 2, ["a", "b"], decode).like(5)
    splits = {split: 1 + numbers for split, numbers in cut(20).items()}
    build_cache(CachePlan(tmp_path / "x-0-0", dataset, splits)).verify()


IMAGES = noise(21)


def test_a_cache_that_another_process_finishes_in_between_is_taken_and_nothing_is_left(tmp_path, monkeypatch):
    plan, barrier = plan_of(noise(30), tmp_path), collectives.barrier

    def finish_and_wait() -> None:
        build_cache(plan)
        barrier()

    monkeypatch.setattr(collectives, "barrier", finish_and_wait)
    build_together(plan)
    open_cache(plan.folder).verify()
    assert [path.name for path in tmp_path.iterdir()] == [plan.folder.name]


def test_damage_that_is_found_while_equal_images_are_counted_is_left_to_the_next_reader(tmp_path):
    pixels = noise(30)
    pixels[cut(30)["train"][1]] = pixels[cut(30)["train"][0]]
    plan = plan_of(pixels, tmp_path)
    build_files(plan)
    os.truncate(plan.images_path(0), 10)
    finish_cache(plan)
    with pytest.raises(DamagedCache, match=r"images-00000\.raw ends within its row"):
        open_cache(plan.folder).verify()

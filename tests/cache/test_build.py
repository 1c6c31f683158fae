"""Building a cache: what it holds, how little memory it takes, and that it goes on after whatever stopped it."""

import json
import logging
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
from conftest import ROOT, make_folder, on_devices, typed
from etils import epath
from PIL import Image

import augment
from largebatch import untrusted
from largebatch.cache import build, known
from largebatch.cache import plan as planning
from largebatch.cache.build import build_cache
from largebatch.cache.cache import MANIFEST, open_cache, seal_of
from largebatch.cache.finish import Block, channel_statistics, channel_sums, finish_cache, part_record
from largebatch.cache.plan import PARTS, CachePlan
from largebatch.sources.find import find_source
from largebatch.sources.source import source_in_memory
from largebatch.sources.split import SPLITS, split_indices
from largebatch.util import UserError

# A child that builds the cache of NUM images of SIZE pixels in FOLDER, in files of ROWS, and notes in LOG what it
# decodes, SECONDS for each; writing a block takes WAIT. It prints how much memory of its own it took at most.
CHILD = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from etils import epath
from largebatch.cache import build
from largebatch.cache import plan as planning
from largebatch.cache.finish import finish_cache
from largebatch.sources.source import Source
from largebatch.sources.split import split_indices
import contextlib

folder, log = sys.argv[1:3]
num, size, rows = map(int, sys.argv[3:6])
seconds, wait = map(float, sys.argv[6:])
planning.MIN_FILE_BYTES = rows * size * size * 3
planning.MOST_FILES = 10**6
build.BLOCK_BYTES = min(build.BLOCK_BYTES, planning.MIN_FILE_BYTES // 2)

@contextlib.contextmanager
def open_pixels():
    with open(log, "a") as file:
        def read(indices, out=None):
            for index in indices:
                time.sleep(seconds)
                file.write(f"{index}\\n")
                file.flush()
            return [np.random.default_rng(index).integers(0, 256, (size, size, 3), np.uint8) for index in indices]
        yield read

ids = [f"{number:06d}" for number in range(num)]
source = Source("numbers", "numbers 1", ids, np.arange(num, dtype=np.int32) % 2, ["a", "b"], open_pixels)
plan = planning.CachePlan(epath.Path(folder), source, split_indices(ids, 0))
peak = 0
write = build._Writer.write
os.cpu_count = lambda: 2  # blocks wait for each thread

def write_slowly(*arguments, **options):
    time.sleep(wait)
    write(*arguments, **options)

build._Writer.write = write_slowly

def memory():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

def watch():
    global peak
    while True:
        peak = max(peak, memory())
        time.sleep(0.005)

before = memory()
threading.Thread(target=watch, daemon=True).start()
build.build_cache(plan)
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


def plan_of(source, folder) -> CachePlan:
    return CachePlan(epath.Path(folder) / "x-0123456789abcdef", source, split_indices(source.ids, 0))


def build_whole(plan: CachePlan):
    """Builds on one host; the cache."""
    build_cache(plan)
    finish_cache(plan)
    return open_cache(plan.folder)


def source_of(pixels: np.ndarray, fingerprint: str = "1"):
    """Images with the ids 00, 01, ..."""
    ids = [f"{number:02d}" for number in range(len(pixels))]
    return source_in_memory(
        "pixels", fingerprint, ids, np.arange(len(pixels), dtype=np.int32) % 2, ["a", "b"], pixels
    )


def noise(num: int, dtype=np.uint8, shape=(8, 6, 3)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (num, *shape), dtype, endpoint=True)


@pytest.fixture
def small_files(monkeypatch):
    """Several images files for a few images, and several blocks in each."""
    monkeypatch.setattr(planning, "MIN_FILE_BYTES", 6 * 8 * 6 * 3)
    monkeypatch.setattr(build, "BLOCK_BYTES", 2 * 8 * 6 * 3)


# ---- what a cache holds -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_cache_holds_every_image_in_the_order_of_its_split(tmp_path, dtype):
    pixels = noise(50, dtype, (8, 6, 5))
    plan = plan_of(source_of(pixels), tmp_path)
    cache = build_whole(plan)
    cache.verify()
    assert len(list(plan.folder.glob("train_images-*.npy"))) > 4
    for split in SPLITS:
        rows, out = plan.splits[split], np.empty((len(plan.splits[split]), cache.layout.row_bytes), np.uint8)
        cache.read_images(split, np.arange(len(rows)), out)
        np.testing.assert_array_equal(out.view(dtype).reshape(-1, 8, 6, 5), pixels[rows])
        assert cache.small_array(f"{split}_ids").tolist() == [f"{row:02d}" for row in rows]
        np.testing.assert_array_equal(cache.small_array(f"{split}_labels"), rows % 2)
    # The files are what NumPy reads, too.
    files = sorted(plan.folder.glob("train_images-*.npy"))
    whole = np.concatenate([np.load(path) for path in files])
    np.testing.assert_array_equal(whole, pixels[plan.splits["train"]])
    train = pixels[plan.splits["train"]].astype(float)
    np.testing.assert_allclose(cache.manifest["mean"], train.mean((0, 1, 2)))
    np.testing.assert_allclose(cache.manifest["std"], train.std((0, 1, 2)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_channel_sums_are_those_of_numpy(dtype):
    pixels = noise(40, dtype, (5, 7, 3))
    sums, square_sums = channel_sums(pixels)
    wide = pixels.astype(object)  # Python's integers
    assert sums.tolist() == wide.sum((1, 2)).tolist()
    assert square_sums.tolist() == (wide**2).sum((1, 2)).tolist()
    mean, std = channel_statistics(sums.sum(0).tolist(), square_sums.sum(0).tolist(), 40 * 5 * 7)
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(std, pixels.astype(float).std((0, 1, 2)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_channel_sums_of_the_largest_values_do_not_overflow(dtype):
    largest, num_lines = np.iinfo(dtype).max, 2**17  # above what is added at once
    sums, square_sums = channel_sums(np.full((1, num_lines, 2, 3), largest, dtype))
    assert sums.tolist() == [[2 * num_lines * int(largest)] * 3]
    assert square_sums.tolist() == [[2 * num_lines * int(largest) ** 2] * 3]
    mean, std = channel_statistics(sums[0].tolist(), square_sums[0].tolist(), 2 * num_lines)
    assert (mean, std) == ([largest] * 3, [1.0] * 3)  # 1 at least


def test_equal_images_are_counted_and_named(tmp_path, caplog):
    pixels = noise(30)
    splits = split_indices([f"{number:02d}" for number in range(30)], 0)
    train, val = splits["train"], splits["val"]
    pixels[train[1]] = pixels[train[0]]
    build_whole(plan_of(source_of(pixels), tmp_path / "one"))
    assert "images with the same pixels as another one: 1, in another split: 0" in caplog.text
    assert f"({train[0]:02d} = {train[1]:02d})" in caplog.text
    caplog.clear()
    pixels[val[0]] = pixels[train[2]]
    build_whole(plan_of(source_of(pixels, "2"), tmp_path / "two"))
    assert "images with the same pixels as another one: 2, in another split: 1" in caplog.text
    assert f"({train[2]:02d} = {val[0]:02d})" in caplog.text
    caplog.clear()
    build_whole(plan_of(source_of(noise(30), "3"), tmp_path / "three"))
    assert "same pixels" not in caplog.text


MIXED = {
    "size": (np.zeros((16, 12, 3), np.uint8), r"dataset.image_size: {} is {} pixels, {} is {}; set a size"),
    "depth": (np.zeros((16, 16), np.uint16), r"dataset: {} has {} bits a channel, {} has {}; allowed: the same"),
    "channels": (
        np.zeros((16, 16), np.uint8),
        r"dataset.channels: {} has {} channels, {} has {}; allowed",
    ),
}
VALUES = {"size": ("12x16", "16x16"), "depth": ("16", "8"), "channels": ("1", "3")}


@pytest.mark.parametrize("what", MIXED)
@pytest.mark.parametrize("odd", ["a/a_0.tif", "b/b_5.tif"])
def test_mixed_images_are_one_line_that_names_both(tmp_path, what, odd):
    """Whichever of them is the first training image, and so the measure of the others."""
    pixels, message = MIXED[what]
    folder = make_folder(tmp_path / "images", {"a": 6, "b": 6}, suffix=".tif")
    Image.fromarray(pixels).save(folder / odd)
    source = find_source("x", path=str(folder))
    with pytest.raises(UserError) as error:
        build_whole(plan_of(source, tmp_path / "caches"))
    values = VALUES[what]
    other = r"[ab]/[ab]_\d.tif"
    one_way = message.format(re.escape(odd), values[0], other, values[1])
    other_way = message.format(other, values[1], re.escape(odd), values[0])
    assert re.match(f"{one_way}|{other_way}", str(error.value)), error.value
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "caches").iterdir())  # nothing is finished that could be kept


def test_pixels_that_cannot_be_stored_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"dataset: \d\d has float32 pixels; allowed: uint8 \| uint16"):
        build_whole(plan_of(source_of(np.zeros((20, 4, 4, 3), np.float32)), tmp_path))


# ---- builds that are stopped ------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_build_that_is_killed_goes_on_and_ends_with_the_same_bytes(tmp_path):
    run_child(tmp_path / "whole" / "x-0", tmp_path / "log")
    folder, log = tmp_path / "killed" / "x-0", tmp_path / "decoded"
    unfinished, rng = folder.parent / ".x-0.build", random.Random(0)
    splits = split_indices([f"{number:06d}" for number in range(120)], 0)
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
        assert decoded & whole_before <= {splits["train"][0]}  # which tells the size
        for path in unfinished.glob("*.npy"):
            split, number = re.match(r"(\w+)_images-(\d+)", path.name).groups()
            whole_before |= set(splits[split][6 * int(number) : 6 * int(number) + 6].tolist())
        assert not folder.exists()
    assert kills == 3
    assert whole_before
    (unfinished / f".train_images-00000.npy.{'0' * 32}.tmp").write_bytes(b"")  # as a kill may leave
    log.write_text("")
    run_child(folder, log)
    assert {int(line) for line in log.read_text().split()} & whole_before <= {splits["train"][0]}
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


@pytest.mark.usefixtures("small_files")
def test_a_process_that_comes_second_takes_the_cache_that_is_there(tmp_path, monkeypatch):
    plan = plan_of(source_of(noise(50)), tmp_path)
    write, company = build._Writer.write, []

    def write_late(self, *arguments, **options):
        if len(company) == 0:
            company.append(True)
            build_whole(plan)
        write(self, *arguments, **options)

    monkeypatch.setattr(build._Writer, "write", write_late)
    first = build_whole(plan)
    first.verify()
    assert [path.name for path in tmp_path.iterdir()] == [plan.folder.name]
    stamp = (plan.folder / MANIFEST).read_bytes()
    build_whole(plan)  # which finds nothing to do
    assert (plan.folder / MANIFEST).read_bytes() == stamp


@pytest.mark.usefixtures("small_files")
def test_a_damaged_part_record_is_named_and_the_next_start_decodes_that_part_again(tmp_path):
    plan = plan_of(source_of(noise(50)), tmp_path)
    build_cache(plan)
    of_fewer_rows = part_record([Block(*(np.zeros((3, 32), np.uint8),) * 2, *channel_sums(noise(3)))])
    for damage in (b"", b"PK\3\4 no zip", b"\x93NUMPY", of_fewer_rows):
        record = sorted((plan.build_folder / PARTS).glob("train-*.npz"))[1]
        record.write_bytes(damage)
        with pytest.raises(UserError, match=rf"augment\.cache_dir: {record} is damaged .*start again") as error:
            finish_cache(plan)
        assert "\n" not in str(error.value)
        build_cache(plan)
    finish_cache(plan)
    open_cache(plan.folder).verify()


@pytest.mark.usefixtures("small_files")
def test_a_failing_disk_says_what_is_kept_and_the_next_start_goes_on(tmp_path, monkeypatch):
    plan, writes, write = plan_of(source_of(noise(50)), tmp_path), [], build._Writer.write

    def fail(self, *arguments, **options):
        writes.append(arguments)
        if len(writes) == 8:  # in the third file of three blocks each
            raise OSError(28, "No space left on device")
        write(self, *arguments, **options)

    monkeypatch.setattr(build._Writer, "write", fail)
    with pytest.raises(
        UserError, match=r"No space left on device\); 2 of 9 files are kept in .*start again"
    ) as error:
        build_cache(plan)
    assert "\n" not in str(error.value)
    assert not list(plan.build_folder.glob(".*.tmp"))
    build_whole(plan).verify()
    assert len(writes) == 8 + 26 - 6  # two files of three blocks were kept


def test_a_file_that_a_full_disk_cuts_off_is_removed(tmp_path):
    plan = plan_of(source_of(noise(200)), tmp_path)  # a block of more bytes than a file buffers
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # what is buffered cannot be written at the close either
    try:
        with pytest.raises(UserError, match=r"cannot write .*File too large"):
            build_cache(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    build_whole(plan).verify()


def test_too_little_room_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    source = source_of(noise(50))
    plan = plan_of(source, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    needed = 50 * 8 * 6 * 3
    monkeypatch.setattr(build, "_write_files", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"augment\.cache_dir: .* has 0\.00 GB free; the cache needs 0\.00 GB more"):
        build_cache(plan)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    build_whole(plan)


def test_unfinished_caches_of_other_content_are_named_and_removed_when_they_are_old(tmp_path, caplog):
    young, old = (tmp_path / f".x-{digit * 16}.build" for digit in "12")
    others = [tmp_path / ".y-1111111111111111.build", tmp_path / ".x-y-1111111111111111.build"]
    for folder in (young, old, *others):
        (folder / "parts").mkdir(parents=True)
        (folder / "train_images-00000.npy").write_bytes(bytes(100))
    long_ago = time.time() - build.OLD_BUILD_SEC - 60
    for folder in (old, *others):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (long_ago, long_ago))
    with caplog.at_level(logging.INFO, "largebatch"):
        build_whole(plan_of(source_of(noise(20)), tmp_path))
    assert f"{young} is an unfinished cache of other content, 0.00 GB" in caplog.text
    assert f"removed {old}, " in caplog.text
    assert not old.exists()
    assert all(folder.exists() for folder in (young, *others))


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.timeout(120)
def test_memory_while_building_does_not_grow_with_the_images(tmp_path):
    """Decoding is faster than writing; 3,000 images are 83 MB."""
    log, options = tmp_path / "log", {"size": 96, "rows": 75, "wait": 0.05}
    few, many = (run_child(tmp_path / f"x-{num}", log, num=num, **options) for num in (750, 3000))
    assert many < 40_000
    assert many < few + 20_000


# ---- warm starts ------------------------------------------------------------------------------------


@pytest.fixture
def of_folder(small_config, tmp_path):
    """A config of a folder of images, with caches of its own."""
    folder = make_folder(tmp_path / "images", {"a": 12, "b": 12})
    small_config.dataset.name, small_config.dataset.path = "mine", str(folder)
    small_config.augment.cache_dir = str(tmp_path / "caches")
    return small_config


def test_a_warm_start_does_not_list_the_source(of_folder, monkeypatch):
    folder = augment.prepare_cache(typed(of_folder)).folder
    for name in ("list_zip", "list_folder"):
        monkeypatch.setattr(untrusted, name, lambda *_: pytest.fail("listed the source"))
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    of_folder.dataset.max_image_pixels += 1  # which shapes no cache
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    images = Path(of_folder.dataset.path)
    images.rename(images.with_name("moved"))
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    of_folder.dataset.split_seed = 1  # another cache
    with pytest.raises(UserError, match=r"dataset.path: .*images does not exist"):
        augment.prepare_cache(typed(of_folder))


@pytest.mark.parametrize(
    "note", ["", "{", "[]", "3", '{"folder": 3}', '{"folder": "../x"}', '{"folder": "gone"}', "\xff"]
)
def test_a_damaged_note_means_that_the_source_is_listed(of_folder, note):
    folder = augment.prepare_cache(typed(of_folder)).folder
    (path,) = Path(of_folder.augment.cache_dir, known.FOLDER).iterdir()
    sound = path.read_bytes()
    path.write_bytes(note.encode("latin-1"))
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    assert path.read_bytes() == sound


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "device"])
def test_a_note_that_is_no_regular_file_is_not_read(of_folder, make):
    folder = augment.prepare_cache(typed(of_folder)).folder
    (path,) = Path(of_folder.augment.cache_dir, known.FOLDER).iterdir()
    sound = path.read_bytes()
    path.unlink()
    make(path)
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    assert path.is_file()
    assert path.read_bytes() == sound


def test_a_damaged_cache_that_is_known_is_built_again(of_folder, caplog):
    folder = augment.prepare_cache(typed(of_folder)).folder
    (folder / MANIFEST).write_text("{}")
    assert augment.prepare_cache(typed(of_folder)).folder == folder
    assert f"damaged cache: {folder / MANIFEST}" in caplog.text
    open_cache(folder).verify()


def test_a_cache_of_version_1_is_built_again_where_it_is_in_the_way_and_else_left_alone(of_folder, caplog):
    folder = augment.prepare_cache(typed(of_folder)).folder
    manifest = {"cache_version": 1, "counts": {}}
    text = json.dumps(manifest | {"manifest_sha256": seal_of(manifest)})
    other = folder.parent / "mine-0000000000000000"
    other.mkdir()
    for place in (folder, other):
        (place / MANIFEST).write_text(text)
    augment.prepare_cache(typed(of_folder)).verify()
    assert f"{folder / MANIFEST} is of cache version 1, this is 2; building it again" in caplog.text
    assert (other / MANIFEST).read_text() == text

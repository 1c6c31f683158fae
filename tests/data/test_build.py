"""Building a cache: what it holds, how little memory it takes, and that it resumes after whatever stopped it."""

import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numbered
import numpy as np
import pytest
from conftest import ROOT, on_devices
from numbered import build

from largebatch.data import cache as caches
from largebatch.data import cache_build
from largebatch.data.cache import MANIFEST, DamagedCache, discard_cache, open_cache
from largebatch.data.cache_build import CachePlan, build_files, channel_sums, finish_cache
from largebatch.data.dataset import SPLITS, dataset_of_files
from largebatch.doctor import check_build
from largebatch.util import UserError


def cut(count: int) -> dict[str, np.ndarray]:
    """Return splits of 80, 10 and 10 percent."""
    parts = np.split(np.random.default_rng(0).permutation(count), [count * 8 // 10, count * 9 // 10])
    return dict(zip(SPLITS, parts, strict=True))


def plan_of(images, folder: Path) -> CachePlan:
    """Return the plan of a cache of images with the ids 00, 01, ..."""
    ids = [f"{number:02d}" for number in range(len(images))]
    dataset = dataset_of_files(
        "noise", ids, np.arange(len(images)) % 2, ["a", "b"], partial(map, images.__getitem__)
    )
    return CachePlan.of(folder / "x-0", dataset, cut(len(images)))


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
    plan, splits = plan_of(pixels, tmp_path), cut(50)
    cache = build(plan)
    cache.verify()
    files = sorted(plan.folder.glob("images-*.raw"))
    assert len(files) > 4
    for split in SPLITS:
        examples, dataset = splits[split], cache.split(split)
        np.testing.assert_array_equal(dataset.images(np.arange(len(examples))), pixels[examples])
        np.testing.assert_array_equal(dataset.images(np.array([1, 0, 1])), pixels[examples[[1, 0, 1]]])
        assert dataset.ids.tolist() == [f"{example:02d}" for example in examples]
        np.testing.assert_array_equal(dataset.labels, examples % 2)
    # The files are what NumPy reads, too.
    whole = np.concatenate([np.fromfile(path, dtype).reshape(-1, 8, 6, 5) for path in files])
    np.testing.assert_array_equal(whole, pixels[np.concatenate(list(splits.values()))])
    train = pixels[splits["train"]].astype(float)
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


@pytest.mark.parametrize("is_crc_equal", [False, True])
def test_equal_images_are_counted_and_named(tmp_path, caplog, monkeypatch, is_crc_equal):
    if is_crc_equal:
        monkeypatch.setattr("zlib.crc32", lambda row: 7)
    pixels, train, val = noise(30), cut(30)["train"], cut(30)["val"]
    build(plan_of(pixels, tmp_path / "none"))
    assert "same pixels" not in caplog.text
    pixels[train[1]] = pixels[train[0]]
    build(plan_of(pixels, tmp_path / "one"))
    assert "images with the same pixels as another one: 1, in another split: 0" in caplog.text
    assert f"({train[0]:02d} = {train[1]:02d})" in caplog.text
    pixels[val[0]] = pixels[train[2]]
    build(plan_of(pixels, tmp_path / "two"))
    assert "images with the same pixels as another one: 2, in another split: 1" in caplog.text
    assert f"({train[2]:02d} = {val[0]:02d})" in caplog.text


# ---- builds that are killed ----------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_build_that_is_killed_resumes_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "MIN_FILE_BYTES", 6 * 8 * 8 * 3)
    numbers = []
    numbered.build(numbered.plan_of(tmp_path / "whole" / "x-0", 120, 8, numbers.append))
    assert set(numbers) == set(range(120))
    folder, log, whole_before = tmp_path / "killed" / "x-0", tmp_path / "decoded", set()
    unfinished, environment = folder.parent / ".x-0.build", on_devices(1) | {"PYTHONPATH": str(ROOT)}
    for enough in (25, 40):
        log.write_text("")
        child = subprocess.Popen([sys.executable, numbered.__file__, folder, log], env=environment)
        while child.poll() is None and log.read_text().count("\n") < enough:
            time.sleep(0.01)
        child.kill()
        child.wait()
        assert child.returncode < 0
        assert {int(line) for line in log.read_text().split()} & whole_before <= {0}  # which tells the size
        for path in unfinished.glob("images-*.raw"):
            number = int(re.fullmatch(r"images-(\d+).raw", path.name)[1])
            whole_before |= set(range(6 * number, 6 * number + 6))
        assert not folder.exists()
    assert whole_before
    (unfinished / f".images-00000.raw.{'0' * 32}.tmp").write_bytes(b"")  # as a kill may leave
    numbers.clear()
    numbered.build(numbered.plan_of(folder, 120, 8, numbers.append))
    assert set(numbers) & whole_before <= {0}
    assert content_of(folder) == content_of(tmp_path / "whole" / "x-0")
    assert [path.name for path in folder.parent.iterdir()] == ["x-0"]


def test_few_blocks_wait_to_be_written():
    """So memory does not grow with the images where decoding is faster than writing."""
    begun = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = cache_build._in_order(pool, begun.append, iter(range(100)), ahead=4)
        for number, _ in enumerate(done):
            assert len(begun) <= number + 6
    assert begun[-1] == 99


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
    build(plan).verify()


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
    build(plan).verify()


def test_nothing_is_left_of_a_build_that_ends_at_its_first_block(tmp_path):
    images = [*noise(5), np.zeros((12, 8, 3), np.uint8), *noise(14)]
    with pytest.raises(UserError, match=r"dataset: 05 has 8x12 .*, .* has 6x8 .*dataset.image_size"):
        build(plan_of(images, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_files")
def test_a_process_that_comes_second_takes_the_cache_that_is_there(tmp_path, monkeypatch):
    plan, write = plan_of(noise(50), tmp_path), cache_build._write_file

    def write_with_company(plan, number, *rest) -> None:
        if number == 2:
            monkeypatch.undo()
            build(plan)
        write(plan, number, *rest)

    monkeypatch.setattr(cache_build, "_write_file", write_with_company)
    cache = build(plan)
    cache.verify()
    assert [path.name for path in tmp_path.iterdir()] == [plan.folder.name]
    assert build(plan).manifest == cache.manifest  # nothing to do


def test_a_cache_that_another_process_built_again_stays(tmp_path):
    plan, damage = plan_of(noise(30), tmp_path), DamagedCache("bad")
    mine = build(plan)
    shutil.rmtree(plan.folder)
    build(plan)  # by another process, which found the damage, too
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
    build(plan)
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
    build(plan)
    on_disk = sum(path.stat().st_size for path in plan.folder.iterdir())
    assert on_disk == pytest.approx(plan.disk_bytes, rel=0.25)

"""Caches that several processes share: what is damaged is found, and what one mends is safe from the others."""

import json
import os
import time

import numpy as np
import pytest
from etils import epath

from largebatch.data import cache_images
from largebatch.data.cache import CACHE_VERSION, DamagedCache, discard_cache, open_cache, open_sound_cache, seal
from largebatch.data.cache_build import build_together
from largebatch.data.cache_images import CachePlan
from largebatch.data.dataset import dataset_of_arrays
from largebatch.util import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)


def build(folder) -> None:
    """Builds a small cache."""
    ids, parts = [f"{number:02d}" for number in range(40)], np.split(np.arange(40), [32, 36])
    dataset = dataset_of_arrays(PIXELS, np.arange(40, dtype=np.int32) % 2, ["a", "b"], ids)
    build_together(CachePlan(epath.Path(folder), dataset, dict(zip(("train", "val", "test"), parts, strict=True))))


@pytest.fixture
def folder(tmp_path):
    """Where the cache goes."""
    return epath.Path(tmp_path) / "caches" / "small-0123"


def age(path, seconds: float) -> None:
    """Makes a file or folder look as if it was last written so long ago."""
    os.utime(path, (time.time() - seconds,) * 2)


# ---- what is damaged --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "cannot be read"),
        ("no JSON", "cannot be read"),
        ("[]", "cannot be read"),
        (None, "cannot be read"),
        ('{"manifest_sha256": "0"}', "does not match its SHA-256"),
        (seal({"cache_version": 1}).decode(), f"is of cache version 1, this is {CACHE_VERSION}"),
    ],
)
def test_a_manifest_that_is_none_is_damage(folder, content, words):
    build(folder)
    path = folder / "manifest.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(DamagedCache, match=f"manifest.json {words}"):
        open_cache(folder)
    assert open_sound_cache(folder) is None
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["flip first", "flip last", "cut", "remove"])
@pytest.mark.parametrize("name", ["images-00000.raw", "crc32.npy", "labels.npy", "ids.npy"])
def test_every_damaged_file_is_named(folder, name, damage):
    build(folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "remove":
        path.unlink()
    else:
        content[10 if damage == "flip first" else -1] ^= 1
        path.write_bytes(content)
    with pytest.raises(DamagedCache, match=name):
        open_cache(folder).verify()


# ---- what others build ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["images-00000.raw", "part/images-00000.raw"])
def test_a_build_that_still_writes_a_file_is_left_alone(folder, place):
    now, dead = (folder.parent / f".small-0123.{letter * 32}.tmp" for letter in "ab")
    for path in (now, dead):
        (path / place).parent.mkdir(parents=True)
        (path / place).write_bytes(b"x")
        for one in (path / place, (path / place).parent, path):
            age(one, 2 * 3600)
    age(now / place, 60)  # which moves no folder's time
    other = folder.parent / ".another.tmp"
    other.mkdir()
    age(other, 2 * 3600)
    build(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([now.name, other.name, folder.name])


def test_two_containers_of_one_host_name_and_pid_build_the_same_cache(folder, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    write, started = cache_images._write_files, []

    def write_with_company(*arguments):
        if not started:
            started.append(True)
            build(folder)  # the other container's, in the middle of this one's
        return write(*arguments)

    monkeypatch.setattr("largebatch.data.cache_images._write_files", write_with_company)
    build(folder)
    open_cache(folder).verify()
    assert list(folder.parent.iterdir()) == [folder]


# ---- what others mend -------------------------------------------------------------------------------


def flip(path):
    """Damages the last byte."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_cache_that_another_process_mended_stays(folder):
    build(folder)
    flip(folder / "images-00000.raw")
    mine = open_cache(folder)
    with pytest.raises(DamagedCache) as damage:
        mine.verify()
    folder.rmtree()
    build(folder)  # by another process, which found the damage, too
    discard_cache(mine, damage.value)
    open_cache(folder).verify()
    discard_cache(open_cache(folder), damage.value)
    assert not folder.exists()
    discard_cache(mine, damage.value)  # which is gone


def test_two_builds_differ_by_a_name(folder):
    manifests = []
    for _ in range(2):
        build(folder)
        manifests.append(json.loads((folder / "manifest.json").read_text()))
        folder.rmtree()
    first, second = manifests
    assert first["build"] != second["build"]
    assert {"build", "built", "manifest_sha256"} >= {name for name in first if first[name] != second[name]}


def test_a_damaged_cache_that_cannot_be_removed_is_named(folder, monkeypatch):
    build(folder)
    flip(folder / "manifest.json")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(folder), "rename", refuse)
    with pytest.raises(UserError, match=r"augment\.cache_dir: cannot remove .*small-0123 \(Permission denied\)"):
        open_sound_cache(folder)

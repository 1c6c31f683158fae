"""Processes that share a folder of caches: what one builds, mends or leaves behind is safe from the others."""

import json
import os
import pkgutil
import time

import pytest
from conftest import typed
from etils import epath

import augment
from largebatch.cache import build as building
from largebatch.cache import known
from largebatch.cache.cache import CACHE_VERSION, DamagedCache, open_cache, open_sound_cache, seal_of
from largebatch.cache.finish import finish_cache
from largebatch.cache.plan import CachePlan
from largebatch.decoding.images import DecodeOptions
from largebatch.sources.find import find_source
from largebatch.sources.source import Source
from largebatch.sources.split import split_indices
from largebatch.util import UserError


def source() -> Source:
    return find_source("synthetic", num_examples=40, options=DecodeOptions((8, 8)))


def plan_of(folder, source: Source) -> CachePlan:
    """The plan of a cache in `folder`."""
    return CachePlan(epath.Path(folder), source, split_indices(source.ids, 0))


def build(folder) -> None:
    """Builds the small cache on one host."""
    plan = plan_of(folder, source())
    building.build_cache(plan)
    finish_cache(plan)


@pytest.fixture
def folder(tmp_path):
    """Where the cache goes."""
    return epath.Path(tmp_path) / "caches" / "small-0123"


def age(path, seconds: float) -> None:
    """Makes a file or folder look as if it was last written so long ago."""
    os.utime(path, (time.time() - seconds,) * 2)


# ---- what others made -------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", ["{}", "[" * 100_000, '{"cache_version": 1}', "sealed", "version 1", "fifo"])
def test_a_manifest_that_is_none_is_damage(folder, manifest):
    folder.mkdir(parents=True)
    path = folder / "manifest.json"
    if manifest == "fifo":
        os.mkfifo(path)
    elif manifest == "sealed":
        fields = {"cache_version": CACHE_VERSION}
        path.write_text(json.dumps(fields | {"manifest_sha256": seal_of(fields)}))
    elif manifest == "version 1":
        path.write_text(json.dumps({"cache_version": 1, "manifest_sha256": seal_of({"cache_version": 1})}))
    else:
        path.write_text(manifest)
    with pytest.raises(
        DamagedCache, match=r"manifest.json (cannot be read|is missing|lacks .*class_names|is of cache version 1)"
    ):
        open_cache(folder)


def test_an_array_that_is_no_regular_file_is_damage(folder):
    build(folder)
    cache = open_cache(folder)
    for name in ("val_labels.npy", "val_images-00000.npy"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(DamagedCache, match=f"{name} cannot be read"):
            cache.verify()
        (folder / name).unlink()
        build_again = folder.parent / "again"
        build(build_again)
        (build_again / name).rename(folder / name)
        build_again.rmtree()


# ---- what others build ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [".small-0123.{}.tmp", ".tmp-small-0123-{}"], ids=["now", "as older code named it"]
)
@pytest.mark.parametrize("place", ["train_images-00000.npy", "part/train_images-00000.npy"])
def test_a_build_that_still_writes_a_file_is_left_alone(folder, name, place):
    now, dead = (folder.parent / name.format(letter * 32) for letter in "ab")
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
    write, started = building._write_files, []

    def write_with_company(*arguments):
        if not started:
            started.append(True)
            build(folder)  # the other container's, in the middle of this one's
        return write(*arguments)

    monkeypatch.setattr("largebatch.cache.build._write_files", write_with_company)
    build(folder)
    open_cache(folder).verify()
    assert list(folder.parent.iterdir()) == [folder]


# ---- what others mend -------------------------------------------------------------------------------


def flip(path):
    """Damages the last byte."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES = {
    "array flipped": lambda folder: flip(folder / "val_images-00000.npy"),
    "manifest flipped": lambda folder: flip(folder / "manifest.json"),
    "manifest gone": lambda folder: (folder / "manifest.json").unlink(),
    "all gone": lambda folder: [path.unlink() for path in folder.iterdir()],
}


class Mending:
    """The commands that build and mend the cache of a config."""

    def __init__(self, config):
        self.config, self.folder, self.builds = config, augment.prepare_cache(typed(config)).folder, 0

    def mend(self, *_):
        """What augment.py does."""
        for attempt in augment.cache_attempts(typed(self.config)):
            with attempt as cache:
                cache.verify()


def once_before(monkeypatch, names: list[str], act) -> list:
    """Runs `act` before the first call of a function. Returns a list that has one entry per call.

    Args:
      names: "module.function", under which the function is called.
    """
    function, calls = pkgutil.resolve_name(names[0]), []

    def late(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            act()
        return function(*arguments)

    for name in names:
        assert pkgutil.resolve_name(name) is function
        monkeypatch.setattr(name, late)
    return calls


@pytest.fixture
def mending(small_config, tmp_path, monkeypatch):
    """A sound cache; `builds` counts those that follow."""
    small_config.augment.cache_dir = str(tmp_path / "caches")
    mending, write = Mending(small_config), building._write_files

    def counted(*arguments):
        mending.builds += 1
        write(*arguments)

    monkeypatch.setattr("largebatch.cache.build._write_files", counted)
    return mending


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("names", "renamings"),
    [(["largebatch.cache.cache.discard_cache", "augment.discard_cache"], 2), (["largebatch.util.beside"], 4)],
    ids=["before it is looked at again", "between that and the renaming"],
)
def test_a_cache_that_another_process_mended_stays(mending, monkeypatch, damage, names, renamings):
    """Both found the damage before either did anything; the other renames twice, what is taken goes back."""
    DAMAGES[damage](mending.folder)
    calls = once_before(monkeypatch, names, mending.mend)
    rename, renamed = type(mending.folder).rename, []

    def counted(path, target):
        renamed.append(target)
        return rename(path, target)

    monkeypatch.setattr(type(mending.folder), "rename", counted)
    mending.mend()
    assert calls
    assert mending.builds == 1
    assert len(renamed) == renamings
    left = {path.name for path in mending.folder.parent.iterdir()}
    assert left == {mending.folder.name, known.FOLDER}


def test_two_builds_differ_by_a_name_that_caches_built_before_need_not_have(folder):
    build(folder)
    first = open_cache(folder).manifest
    folder.rmtree()
    build(folder)
    second = open_cache(folder).manifest
    names = first.pop("build"), second.pop("build")
    assert names[0] != names[1]
    assert {"built"} >= {name for name in first if first[name] != second[name]}
    del first["built"], second["built"]  # whole seconds, which may be the same or not
    assert first == second
    first["built"] = ""
    (folder / "manifest.json").write_text(json.dumps(first | {"manifest_sha256": seal_of(first)}))
    open_cache(folder).verify()


def test_a_damaged_cache_that_cannot_be_removed_is_named(folder, monkeypatch):
    build(folder)
    flip(folder / "manifest.json")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(folder), "rename", refuse)
    with pytest.raises(UserError, match=r"augment\.cache_dir: cannot remove .*small-0123 \(Permission denied\)"):
        open_sound_cache(folder)


# ---- data that make no cache ------------------------------------------------------------------------

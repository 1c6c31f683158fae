"""Single flipped bits and cut files: every one is found, in checkpoints, caches and manifests."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import make_small_config
from etils import epath
from figures import record

import train
from largebatch.data import cache as caches
from largebatch.data import streaming
from largebatch.data.batching import DataSharding, choose_sharding
from largebatch.data.cache import Cache, DamagedCache, open_cache
from largebatch.data.placement import place
from largebatch.data.streaming import Upcoming
from largebatch.runs import checkpoints
from largebatch.util import UserError


class FinishedRun(NamedTuple):
    """A run's folder, that of its data cache, and the seed of its split."""

    folder: Path
    cache_folder: epath.Path
    split_seed: int


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints."""
    config = make_small_config(tmp_path_factory.mktemp("cache"))
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "MIN_FILE_BYTES", 24 * 16 * 16 * 3)  # five images files for 100 images
        train.train_and_evaluate(config, str(folder))
    (cache_folder,) = epath.Path(config.augment.cache_dir).glob("synthetic-*")
    return FinishedRun(folder, cache_folder, config.dataset.split_seed)


def damage(path: Path, rng: random.Random) -> str:
    """Flips one bit or cuts the file; returns which."""
    content = bytearray(path.read_bytes())
    if content and rng.random() < 0.7:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        return "flipped"
    path.write_bytes(content[: rng.randrange(len(content))] if content else b"x")
    return "cut"


def trouble_of(read, *arguments) -> str:
    """Return the error that names the damage; empty if there is none."""
    try:
        read(*arguments)
    except (DamagedCache, UserError) as trouble:
        return str(trouble)
    return ""


def damage_checkpoints(run: FinishedRun, count: int, rng: random.Random) -> Counter:
    """Damages a file, reads the checkpoint as a resuming run does, and mends the file, `count` times.

    Some of Orbax's own files say nothing that is read again: damage there counts as harmless if all is restored.
    """
    newest = max((run.folder / "checkpoints").iterdir())
    sound, description = checkpoints.read_arrays(newest)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    # Half of the damage to what is largest, where nearly all bytes are, and to the description; half to any file.
    largest = [max(files, key=lambda path: path.stat().st_size), newest / checkpoints.DESCRIPTION]
    outcomes = Counter()
    for number in range(count):
        path = rng.choice(largest if number % 2 else files)
        before = path.read_bytes()
        kind = damage(path, rng)
        if trouble := trouble_of(checkpoints.read_arrays, newest):
            assert str(newest) in trouble
            outcomes[kind] += 1
        else:
            arrays, again = checkpoints.read_arrays(newest)
            assert (again, arrays.keys()) == (description, sound.keys()), f"{path} was {kind}"
            assert all(np.array_equal(arrays[name], sound[name]) for name in sound), f"{path} was {kind}"
            outcomes["harmless"] += 1
        path.write_bytes(before)
    record("damage", {"of": "checkpoint files"} | outcomes)
    return outcomes


def stream_a_pass(cache: Cache, sharding: DataSharding, seed: int) -> None:
    """Reads every training image, four at a time on each device, as a streamed run does."""
    data = place(cache, sharding, seed, buffer_rows=4)
    batch_size, num_steps = 24, -(-sharding.num_originals // 24)
    upcoming = Upcoming(0, 0, num_steps, lambda step: step * batch_size)
    for first in range(num_steps):
        data.train.for_steps(dataclasses.replace(upcoming, first=first), 1)


def read_cache(run: FinishedRun, read_training: Callable) -> None:
    """Reads a cache as training does, and its test images as augment.py does; raises what they raise."""
    cache = open_cache(run.cache_folder)
    sharding = choose_sharding(None, cache.layout.counts["train"], jax.device_count(), 8)
    read_training(cache, sharding, run.split_seed)
    cache.split("test").images(np.arange(cache.layout.counts["test"]))


def damage_caches(run: FinishedRun, count: int, rng: random.Random, read_training=place) -> None:
    """Damages a data cache, reads and mends it, `count` times: images files, arrays and manifest, in turn."""
    images = sorted(run.cache_folder.glob("images-*"))
    assert len(images) == 5
    kinds_of_files = images, sorted(run.cache_folder.glob("*.npy")), [run.cache_folder / "manifest.json"]
    for number in range(count):
        path = rng.choice(kinds_of_files[number % 3])
        before = path.read_bytes()
        kind = damage(path, rng)
        trouble = trouble_of(read_cache, run, read_training)
        path.write_bytes(before)
        assert path.name in trouble, f"{path} was {kind}; {trouble or 'nobody has noticed'}"
    open_cache(run.cache_folder).verify()
    how = " of a stream" if read_training is stream_a_pass else ""
    record("damage", {"of": f"cache{how}", "found": count})


def test_some_damage_to_checkpoints(run):
    outcomes = damage_checkpoints(run, 12, random.Random(0))
    assert outcomes["flipped"] + outcomes["cut"] >= 6


def test_some_damage_to_caches(run):
    damage_caches(run, 15, random.Random(0))


@pytest.fixture
def kept_caches(monkeypatch):
    """A stream that finds damage leaves the cache where it is, to be mended and damaged again."""
    monkeypatch.setattr(streaming, "discard_cache", lambda cache, damage: None)


def test_some_damage_to_caches_that_are_streamed(run, kept_caches):
    damage_caches(run, 9, random.Random(2), stream_a_pass)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_much_damage(run, kept_caches):
    damage_checkpoints(run, 400, random.Random(1))
    damage_caches(run, 300, random.Random(1))
    damage_caches(run, 300, random.Random(3), stream_a_pass)

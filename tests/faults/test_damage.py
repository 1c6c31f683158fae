"""Single flipped bits and cut files: every one is found, in checkpoints, caches and manifests."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from figures import record
from ml_collections import config_dict

import train
from largebatch.data import cache as caches
from largebatch.data import streaming
from largebatch.data.batching import DataSharding, choose_sharding
from largebatch.data.cache import Cache, DamagedCache, open_cache
from largebatch.data.placement import place
from largebatch.data.streaming import Upcoming
from largebatch.runs import checkpoints
from largebatch.util import UserError


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run's folder, that of its data cache, and its config."""

    folder: Path
    cache_folder: epath.Path
    config: config_dict.ConfigDict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints."""
    from configs import default

    config = default.get_config()
    config.augment.cache_dir = str(tmp_path_factory.mktemp("cache"))
    config.dataset.num_examples, config.dataset.image_size = 100, 16
    config.train.inner_steps = 3  # the program of most other tests
    config.train.outer_steps = 2
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches, "MIN_FILE_BYTES", 24 * 16 * 16 * 3)  # five images files for 100 images
        train.train_and_evaluate(config, str(folder))
    (cache_folder,) = epath.Path(config.augment.cache_dir).glob("synthetic-*")
    return FinishedRun(folder, cache_folder, config)


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
    except (checkpoints.DamagedCheckpoint, DamagedCache, UserError) as trouble:
        return str(trouble)
    return ""


def damage_checkpoints(run: FinishedRun, count: int, rng: random.Random) -> dict:
    """Damages a file, reads the checkpoint as a resuming run does, and mends the file, `count` times.

    Some of Orbax's own files say nothing that is read again: damage there counts as harmless if all is restored.
    """
    newest = max((run.folder / "checkpoints").iterdir())
    sound, description = checkpoints.read_arrays(newest)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    outcomes = {"flipped": 0, "cut": 0, "harmless": 0, "restored silently": 0}
    # Half of the damage to what is largest, where nearly all bytes are, and to the description; half to any file.
    largest = [max(files, key=lambda path: path.stat().st_size), newest / checkpoints.DESCRIPTION]
    for number in range(count):
        path = rng.choice(largest if number % 2 else files)
        before = path.read_bytes()
        kind = damage(path, rng)
        if trouble := trouble_of(checkpoints.read_arrays, newest):
            assert str(newest) in trouble
            assert "\n" not in trouble
            outcomes[kind] += 1
        else:
            arrays, again = checkpoints.read_arrays(newest)
            same = again == description and all(np.array_equal(arrays[name], sound[name]) for name in sound)
            outcomes["harmless" if same and arrays.keys() == sound.keys() else "restored silently"] += 1
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
    read_training(cache, sharding, run.config.dataset.split_seed)
    cache.split("test").images(np.arange(cache.layout.counts["test"]))


def damage_caches(run: FinishedRun, count: int, rng: random.Random, read_training=place) -> None:
    """Damages a data cache, reads and mends it, `count` times: images files, arrays and manifest, in turn."""
    files = sorted(run.cache_folder.iterdir())
    images = [path for path in files if path.name.startswith("images-")]
    assert len(images) == 5
    arrays, manifest = [path for path in files if path.suffix == ".npy"], [run.cache_folder / "manifest.json"]
    places = {"images": images, "arrays": arrays, "manifest": manifest}
    figures = {place_: Counter() for place_ in places}
    for number in range(count):
        place_ = list(places)[number % len(places)]
        path = rng.choice(places[place_])
        before = path.read_bytes()
        kind = damage(path, rng)
        trouble = trouble_of(read_cache, run, read_training)
        path.write_bytes(before)
        assert trouble, f"{path} was {kind}, and nobody has noticed"
        assert "\n" not in trouble
        assert path.name in trouble, (path, trouble)
        figures[place_][kind] += 1
    open_cache(run.cache_folder).verify()
    how = " of a stream" if read_training is stream_a_pass else ""
    for place_, counts in figures.items():
        record("damage", {"of": f"cache, {place_}{how}"} | counts)


def test_some_damage_to_checkpoints(run):
    outcomes = damage_checkpoints(run, 40, random.Random(0))
    assert outcomes["restored silently"] == 0
    assert outcomes["flipped"] + outcomes["cut"] >= 20


def test_some_damage_to_caches(run):
    damage_caches(run, 33, random.Random(0))


@pytest.fixture
def kept_caches(monkeypatch):
    """A stream that finds damage leaves the cache where it is, to be mended and damaged again."""
    monkeypatch.setattr(streaming, "discard_cache", lambda cache, damage: None)


def test_some_damage_to_caches_that_are_streamed(run, kept_caches):
    damage_caches(run, 16, random.Random(2), stream_a_pass)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_much_damage(run, kept_caches):
    assert damage_checkpoints(run, 400, random.Random(1))["restored silently"] == 0
    damage_caches(run, 300, random.Random(1))
    damage_caches(run, 300, random.Random(3), stream_a_pass)

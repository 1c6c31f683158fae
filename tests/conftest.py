"""Eight CPU devices in one process, and own cache folders, before JAX is imported."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# JAX heeds this before XLA_FLAGS, which are the caller's and reach every process that a test starts.
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Most of the suite's time would be compiling: all of its processes share what one has compiled.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for folder in Path(tempfile.gettempdir()).glob("largebatch-*"):
        with contextlib.suppress(OSError):  # another run removes it too
            if time.time() - folder.stat().st_mtime > 24 * 3600:  # its tests were killed
                shutil.rmtree(folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="largebatch-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import subprocess
import sys

import numpy as np
import pytest
from ml_collections import config_dict
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases"
EUROSAT = ROOT.parent / "shared" / "data" / "EuroSAT.zip"
sys.path.insert(0, str(ROOT))


def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory) -> Path:
    """One cache folder for all tests of a worker, so that data are made once."""
    return tmp_path_factory.mktemp("cache")


_program_caches = []  # one at most


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """Runs of train.py in this process share their programs, while those fit.

    Each takes 800 memory maps; at Linux' limit of 65,530 the process dies.
    """

    def shared_program_cache():
        if not _program_caches:
            _program_caches.append(sys.modules["build"].ProgramCache())
        return _program_caches[0]

    if "train" in sys.modules:
        monkeypatch.setattr("train.ProgramCache", shared_program_cache)
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        _program_caches.clear()
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True)
def databases_closed(monkeypatch):
    """Closes what a test opened by Optuna: Python 3.13 warns of connections left to the garbage collector."""
    if "optuna" not in sys.modules:
        yield
        return
    storage_class, opened = sys.modules["optuna"].storages.RDBStorage, []
    make = storage_class.__init__

    def make_and_note(self, *arguments, **options):
        opened.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(storage_class, "__init__", make_and_note)
    yield
    for storage in opened:
        if hasattr(storage, "scoped_session"):  # else it was refused before it connected
            storage.remove_session()
            storage.engine.dispose()


@pytest.fixture
def small_config(session_cache) -> config_dict.ConfigDict:
    """`make_small_config` for a test."""
    return make_small_config(session_cache)


def typed(config: config_dict.ConfigDict):
    """The config as programs take it, a `fields.Config`."""
    import model
    from largebatch.config import rules

    return rules.check(config.to_dict(), model.MODELS)


def make_small_config(cache_dir) -> config_dict.ConfigDict:
    """The embedded default, shrunk to run in a second or two."""
    from configs import default

    c = default.get_config()
    c.augment.cache_dir = str(cache_dir)
    c.dataset.num_examples = 100
    c.dataset.image_size = 16
    c.train.inner_steps = 3
    c.train.outer_steps = 2
    c.batch.micro_batch_size = 16
    return c


@pytest.fixture(scope="session")
def eurosat_zip() -> Path:
    """The real data set, where it is at hand."""
    if not EUROSAT.exists():
        pytest.skip(f"the real data set is not at {EUROSAT}")
    return EUROSAT


def make_folder(root: Path, classes: dict[str, int], size=(16, 16), suffix=".png", seed=0) -> Path:
    """Class folders of random images."""
    rng = np.random.default_rng(seed)
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{name}_{i}{suffix}")
    return root


def find_set(name: str = "mine", path=None, *, of_pixels: bool = False, cache_dir="", **fields):
    """The data set that a config with these fields names."""
    from largebatch.config.fields import DatasetConfig
    from largebatch.data.sources.find import find_dataset

    fields = DatasetConfig(name=name, path=path and str(path), **fields)
    dataset = find_dataset(fields, str(cache_dir), of_pixels=of_pixels)
    assert dataset.image_shape  # refused here if the first image is bad
    return dataset


def decode_all(dataset) -> np.ndarray:
    """All images of a data set."""
    return dataset.images(np.arange(len(dataset.ids)))


def on_devices(count: int) -> dict[str, str]:
    """This process's environment, for one with `count` CPU devices."""
    return os.environ | {"JAX_NUM_CPU_DEVICES": str(count)}


def run_script(*arguments, env=None, timeout=300, cwd=ROOT) -> subprocess.CompletedProcess:
    """Runs a script of the project as a user would, on two devices unless `env` says otherwise."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=on_devices(2) | (env or {}), capture_output=True, text=True, timeout=timeout
    )


def small_flags(cache_dir, **fields) -> list[str]:
    """Flags of train.py for a run of some seconds, with other fields."""
    defaults = {
        "augment.cache_dir": cache_dir,
        "dataset.num_examples": 100,
        "dataset.image_size": 16,
        "train.inner_steps": 3,  # one program with the runs of other tests
        "train.outer_steps": 1,
    }
    return [f"--config.{name}={value}" for name, value in (defaults | fields).items()]


def assert_one_line_error(result: subprocess.CompletedProcess, *words: str, code: int = 1) -> None:
    """One line on stderr that holds all `words`, the right exit code, and no traceback."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == code, result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def facts_of(num_originals: int, image_shape: tuple[int, int, int], num_classes: int = 5):
    """The DatasetInfo of uint8 images whose pixels have mean 120 and deviation 70."""
    from largebatch.data.cache import DatasetInfo, RowLayout

    channels = image_shape[-1]
    layout = RowLayout.of({"train": num_originals, "val": 8, "test": 8}, image_shape, np.dtype(np.uint8))
    return DatasetInfo(layout, num_classes, mean=(120.0,) * channels, std=(70.0,) * channels)

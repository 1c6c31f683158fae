"""Malformed configs, caches, data and run folders from a seeded fuzzer: one clear line each, and no hang."""

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make_folder, run_script
from figures import record
from test_decode import png_of_a_header
from test_sources import png, write_zip

from configs import default
from largebatch.config.dicts import RULES
from largebatch.runs import checkpoints
from largebatch.runs.folder import RunFolder

VALUES = ("x", " ", "{", "[1, 2", "1e400x", "'full ", "é", "0x1g", "--", "/", "lamb adam", "\t")  # no Python values
TIMEOUT_SEC = 120
CASES = 75  # of a seed


class Case:
    """A command that must fail with one line, and words of which that line must hold one.

    A damaged cache, which is built again, is no failure: then `code` is 0.
    """

    def __init__(self, arguments: list, words: tuple[str, ...], code: tuple[int, ...] = (1, 2)):
        self.arguments, self.words, self.code = arguments, words, code

    def check(self) -> None:
        result = run_script(*self.arguments, timeout=TIMEOUT_SEC)
        shown = f"{self.arguments}\n{result.stderr}"
        assert result.returncode in self.code, shown
        assert "Traceback" not in result.stderr + result.stdout, shown
        begin = "damaged cache: " if self.code == (0,) else r"(train|augment|evaluate)\.py: "
        (told,) = [line for line in result.stderr.splitlines() if re.match(begin, line)]
        assert any(word in told for word in self.words), shown


# ---- configs ---------------------------------------------------------------------------------------


CONFIG_FILES = (
    "", "x = 1", "def get_config(): return 3", "def get_config(): raise ValueError('boo')",
    "import nothing_like_this", "def get_config(a, b): pass", "def get_config(:\n)",
    "from configs import default\ndef get_config():\n default.get_config().nope.x = 1",
)  # fmt: skip


def config_case(folder: Path, rng: random.Random, _) -> Case:
    kind, field = rng.choice(("value", "value", "value", "name", "file")), rng.choice(sorted(RULES))
    if kind == "value":
        text = rng.choice(VALUES)
        field = rng.choice([name for name in sorted(RULES) if not RULES[name].allows(text)])
        return Case(["train.py", f"--config.{field}={text}", f"--workdir={folder / 'run'}"], (field,))
    if kind == "name":
        position = rng.randrange(len(field))
        name = f"{field[:position]}{rng.choice('xyz_.')}{field[position + 1 :]}q"
        return Case(["train.py", f"--config.{name}=1"], (name, "--config"))
    path = folder / "config.py"
    path.write_text(rng.choice(CONFIG_FILES))
    return Case(["train.py", f"--config={path}"], ("--config",))


# ---- data ------------------------------------------------------------------------------------------


def broken_image(folder: Path, rng: random.Random) -> tuple[Path, str]:
    root = make_folder(folder / "data", {"a": 12, "b": 12})
    victim, good = rng.choice(sorted(root.rglob("*.png"))), png((16, 16))
    cut = good[: rng.randrange(20, len(good) // 2)]
    contents = (b"", cut, rng.randbytes(200), b"<html>not found</html>", png((16, 7)), png((16, 16), mode="L"))
    victim.write_bytes(rng.choice(contents))
    return root, victim.name


def cut_zip(folder: Path, rng: random.Random) -> tuple[Path, str]:
    content = write_zip(folder / "set.zip", {f"{name}/1.png": png() for name in "ab"}).read_bytes()
    (folder / "set.zip").write_bytes(content[: rng.randrange(len(content) - 60)])
    return folder / "set.zip", str(folder)


def misnamed(folder: Path, _) -> tuple[Path, str]:
    """A picture of a name that no line of text can hold."""
    root = make_folder(folder / "data", {"a": 12, "b": 12})
    shutil.copy(root / "a" / "a_0.png", os.fsencode(root / "a") + b"/\xff.png")
    return root, "unsafe name"


def large(folder: Path, _) -> tuple[Path, str]:
    """A zip of ten pictures of far too many pixels; fewer are refused before any is read."""
    files = {f"{name}/{number}.png": png_of_a_header(40_000, 40_000, 8) for name in "ab" for number in range(5)}
    return write_zip(folder / "set.zip", files), "pixels; allowed: up to"


def data_case(folder: Path, rng: random.Random, _) -> Case:
    path, word = rng.choice([broken_image, broken_image, cut_zip, misnamed, large])(folder, rng)
    fields = [f"--config.augment.cache_dir={folder / 'cache'}", "--config.dataset.name=mine"]
    return Case(["augment.py", *fields, f"--config.dataset.path={path}"], (word,), code=(1,))


# ---- caches and run folders ------------------------------------------------------------------------


def junk(rng: random.Random) -> bytes:
    """Content that is no manifest or JSON file of ours."""
    return rng.choice(
        (b"", b"{", b"null", b"[]", b"3", b'{"a": 1}', b"\xff\xfe", rng.randbytes(64), b'{"counts": {}}' * 2)
    )


def cache_case(folder: Path, rng: random.Random, cache: Path) -> Case:
    """A damaged cache is named and built again."""
    shutil.copytree(cache, folder / "cache", ignore=shutil.ignore_patterns("xla"))
    (own,) = (folder / "cache").glob("synthetic-*")
    victim = rng.choice([*sorted(own.iterdir()), own / "manifest.json"])
    if rng.random() < 0.3:
        victim.unlink()
    else:
        victim.write_bytes(junk(rng))
    return Case(["augment.py", f"--config.augment.cache_dir={folder / 'cache'}", *SMALL], (own.name,), code=(0,))


SMALL = ["--config.dataset.num_examples=100", "--config.dataset.image_size=16"]


def run_case(folder: Path, rng: random.Random, cache: Path) -> Case:
    """A run folder whose files are something else."""
    run, kind = folder / "run", rng.choice(("config", "summary", "rows", "evaluate"))
    run.mkdir()
    arguments = ["train.py", f"--config.augment.cache_dir={cache}", *SMALL, f"--workdir={run}"]
    if kind == "summary":
        RunFolder(run).begin(default.get_config().to_dict())
        (run / "summary.json").write_bytes(b"[" + junk(rng))
    elif kind == "rows":
        (run / "metrics.jsonl").write_bytes(b"[" + junk(rng) + b"\n")
    else:
        (run / "config.json").write_bytes(b"[" + junk(rng))
    if kind == "evaluate":
        arguments, broken = ["evaluate.py", run], run / "checkpoints" / "00000003" / checkpoints.DESCRIPTION
        broken.parent.mkdir(parents=True)
        broken.write_bytes(junk(rng))
    return Case(arguments, (str(run), "another config"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A sound cache to damage copies of."""
    folder = tmp_path_factory.mktemp("cache")
    assert run_script("augment.py", f"--config.augment.cache_dir={folder}", *SMALL).returncode == 0
    return folder


def fuzz(count: int, seed: int, tmp_path: Path, cache: Path) -> None:
    """Checks all cases, records how many gave one clear line, and fails if any did not."""
    failed = []
    for number in range(count):
        make = (config_case, data_case, cache_case, run_case)[number % 4]
        (tmp_path / str(number)).mkdir()
        try:
            make(tmp_path / str(number), random.Random(seed * 1000 + number), cache).check()
        except (AssertionError, ValueError, subprocess.TimeoutExpired) as failure:
            failed.append(f"case {number}: {failure}")
    record("fuzz", {"cases": count, "seed": seed, "one clear line": count - len(failed), "not": len(failed)})
    assert not failed, "\n\n".join(failed)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_some_malformed_input(tmp_path, cache):
    fuzz(10, 0, tmp_path, cache)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_much_malformed_input(seed, tmp_path, cache):
    fuzz(CASES, seed, tmp_path, cache)

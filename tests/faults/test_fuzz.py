"""Malformed configs, caches, data and run folders from a seeded fuzzer: one clear line each, and no hang."""

import ast
import io
import os
import random
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from conftest import make_folder, run_script
from figures import record
from PIL import Image
from test_bad_data import ZIPS
from test_decode import gif_of_a_large_frame, png_of_a_header
from test_sources import write_zip

from configs import default
from largebatch.config.dicts import RULES
from largebatch.runs import checkpoints
from largebatch.runs.folder import RunFolder

VALUES = (
    "-1", "0", "1.5", "-0.5", "nan", "inf", "-inf", "1e400", "''", "' '", "x", "None", "True", "[]", "[1, 2]", "{}",
    "'full '", "2**3", "99999999999999999999", "é", "0x10", "1_000", "--", "/", "lamb adam", "", "  ", "\t",
)  # fmt: skip
TIMEOUT_SEC = 120
CASES = 75  # of a seed


class Case:
    """A command that must fail with one line, and words of which that line must hold one.

    Without words it must say nothing of the kind.
    """

    def __init__(self, arguments: list, words: tuple[str, ...], code: tuple[int, ...] = (1, 2)):
        self.arguments, self.words, self.code = arguments, words, code

    def check(self) -> None:
        result = run_script(*self.arguments, timeout=TIMEOUT_SEC)
        errors = [line for line in result.stderr.splitlines() if re.match(r"(train|augment|evaluate)\.py: ", line)]
        shown = f"{self.arguments}\n{result.stderr}"
        assert result.returncode in self.code, shown
        assert "Traceback" not in result.stderr + result.stdout, shown
        assert len(errors) == (0 if self.code == (0,) else 1), shown
        told = errors or [line for line in result.stderr.splitlines() if line.startswith("damaged cache: ")]
        assert len(told) == bool(self.words), shown
        assert not told or any(word in told[0] for word in self.words), shown


# ---- configs ---------------------------------------------------------------------------------------


def literal(text: str) -> object:
    """What config_flags reads for a field of mixed type."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


# How the command line reads the value of a field, by the field's type.
READ = {
    int: flags.IntegerParser().parse,
    float: flags.FloatParser().parse,
    bool: flags.BooleanParser().parse,
    str: str,
    object: literal,
}


def is_malformed(field: str, text: str) -> bool:
    """Whether `field` cannot take the value that the command line reads `text` as."""
    group, _, name = field.rpartition(".")
    config = default.get_config()
    try:
        value = READ[(config[group] if group else config).get_type(name)](text)
    except ValueError:
        return True
    return not RULES[field].allows(value)


def config_case(folder: Path, rng: random.Random) -> Case:
    kind = rng.choice(("value", "value", "value", "name", "file", "syntax"))
    if kind == "value":
        field = rng.choice(sorted(RULES))
        text = rng.choice([text for text in VALUES if is_malformed(field, text)])
        return Case(["train.py", f"--config.{field}={text}", f"--workdir={folder / 'run'}"], (field,))
    if kind == "name":
        field = rng.choice(sorted(RULES))
        position = rng.randrange(len(field))
        name = field[:position] + rng.choice("xyz_.") + field[position + 1 :]
        if name in RULES:
            name += "q"
        return Case(["train.py", f"--config.{name}=1"], (name, "--config"))
    path = folder / "config.py"
    texts = {
        "file": rng.choice(("", "x = 1", "def get_config(): return 3", "def get_config(): raise ValueError('boo')",
                            "import nothing_like_this", "def get_config(a, b): pass", "raise SystemExit(0)",
                            "from configs import default\ndef get_config():\n default.get_config().nope.x = 1")),
        "syntax": "".join(rng.choice("abc()[]:= \n'\"#0.") for _ in range(40)) + "\n)",
    }  # fmt: skip
    path.write_text(texts[kind])
    return Case(["train.py", f"--config={path}"], ("--config",))


# ---- data ------------------------------------------------------------------------------------------


def encoded(rng: random.Random, suffix: str) -> bytes:
    """A picture that is not one, or not one of ours."""
    good = io.BytesIO()
    pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(good, "PNG" if suffix == ".png" else "JPEG")
    content = good.getvalue()
    kind = rng.choice(("empty", "cut", "noise", "deep", "text", "size"))
    if kind == "deep":
        deep = io.BytesIO()
        Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16)).save(deep, "PNG")
        return deep.getvalue()
    if kind == "size":
        other = io.BytesIO()
        Image.fromarray(pixels[:, :7]).save(other, "PNG")
        return other.getvalue()
    return {
        "empty": b"", "cut": content[: rng.randrange(20, len(content) // 2)], "noise": rng.randbytes(200),
        "text": b"<html>not found</html>",
    }[kind]  # fmt: skip


def data_case(folder: Path, rng: random.Random) -> Case:
    kind = rng.choice(("image", "image", "one class", "empty", "no class", "few", "zip", "file", "dangling"))
    root, path = folder / "data", folder / "data"
    suffix = rng.choice((".png", ".jpg"))
    words: tuple[str, ...] = (str(root), "dataset.", "damaged image", "pixels")
    if kind in ("image", "zip"):
        make_folder(root, {"a": 12, "b": 12}, suffix=suffix)
    if kind == "image":
        victim = rng.choice(sorted(root.rglob(f"*{suffix}")))
        victim.write_bytes(encoded(rng, suffix))
        words = (victim.name,)
    elif kind == "one class":
        make_folder(root, {"a": 20})
    elif kind == "empty":
        (root / "a").mkdir(parents=True)
    elif kind == "no class":
        make_folder(folder, {"data": 12})
    elif kind == "few":
        make_folder(root, {"a": 2, "b": 3})
        words = ("at least 10",)
    elif kind == "zip":
        path = Path(shutil.make_archive(str(folder / "packed"), "zip", root))
        content = bytearray(path.read_bytes())
        path.write_bytes(content[: rng.randrange(len(content) - 60)])
    elif kind == "file":
        path.write_bytes(rng.randbytes(100))
    elif kind == "dangling":
        make_folder(root, {"a": 12, "b": 12})
        (root / "a" / "dangling.png").symlink_to(folder / "nowhere")
        words = ("dangling.png",)
    fields = [f"--config.augment.cache_dir={folder / 'cache'}", "--config.dataset.name=mine"]
    return Case(["augment.py", *fields, f"--config.dataset.path={path}"], words)


# ---- strange data ----------------------------------------------------------------------------------


def sound(folder: Path, _) -> tuple[Path, ...]:
    return (make_folder(folder / "data", {"a": 12, "b": 12}),)


def linked_folders(folder: Path, rng: random.Random) -> tuple[Path, ...]:
    """Class folders that are links, which is no fault."""
    (root,) = sound(folder, rng)
    (folder / "linked").mkdir()
    for name in "ab":
        (folder / "linked" / name).symlink_to(root / name)
    return (folder / "linked",)


def link(name: str, target: str, *words: str) -> Callable:
    """A folder in which `name` is a link to `target`, which is no fault without `words`."""

    def make(folder: Path, rng: random.Random) -> tuple:
        (root,) = sound(folder, rng)
        (root / name).symlink_to(root / target)
        return root, *words

    return make


def many_entries(folder: Path, rng: random.Random) -> tuple[Path, str]:
    with zipfile.ZipFile(folder / "set.zip", "w") as archive:
        for number in range(rng.randrange(50_000, 100_000)):
            archive.writestr(f"{'ab'[number % 2]}/{number}.png", b"")
    return folder / "set.zip", "damaged image"


def named(name: bytes) -> Callable:
    """A folder with a picture of a name that no line of text can hold."""

    def make(folder: Path, rng: random.Random) -> tuple[Path, str]:
        (root,) = sound(folder, rng)
        shutil.copy(root / "a" / "a_0.png", os.fsencode(root / "a") + b"/" + name)
        return root, "unsafe name"

    return make


def packed(content: bytes, word: str) -> Callable:
    """A zip of ten such pictures, as fewer are refused before any is read."""
    files = {f"{name}/{number}.png": content for name in "ab" for number in range(5)}
    return lambda folder, _: (write_zip(folder / "set.zip", files), word)


def lying(message: str) -> Callable:
    """A zip whose directory says something else than is there."""

    def make(folder: Path, _) -> tuple[Path, str]:
        ZIPS[message](folder / "set.zip")
        return folder / "set.zip", message

    return make


STRANGE: dict[str, Callable] = {
    "40,000 x 40,000 pixels": packed(png_of_a_header(40_000, 40_000, 8), "pixels; allowed: up to"),
    "GIF that clears 3.6 GB": packed(gif_of_a_large_frame(), "pixels; allowed: up to"),
    "linked folders": linked_folders,
    "loop": link("a/again", "."),
    "link to a picture that is gone": link("a/gone.png", "nowhere", "gone.png cannot be read"),
    "line end in a name": named(b"x\ny.png"),
    "name that is no UTF-8": named(b"\xff.png"),
    "many entries": many_entries,
    **{message: lying(message) for message in ZIPS},
}


def strange_case(folder: Path, rng: random.Random, number: int) -> Case:
    """Data that is not what it seems; `number` after number, so that all come."""
    path, *words = list(STRANGE.values())[number % len(STRANGE)](folder, rng)
    arguments = [f"--config.augment.cache_dir={folder / 'cache'}", "--config.dataset.name=mine"]
    arguments += [f"--config.dataset.path={path}", "--config.dataset.image_size=16"]
    return Case(["augment.py", *arguments], tuple(words), code=(1,) if words else (0,))


# ---- caches and run folders ------------------------------------------------------------------------


def junk(rng: random.Random) -> bytes:
    """What a manifest or a JSON file may turn out to be."""
    return rng.choice(
        (b"", b"{", b"null", b"[]", b"3", b'{"a": 1}', b"\xff\xfe", rng.randbytes(64), b'{"counts": {}}' * 2)
    )


def cache_case(folder: Path, rng: random.Random, cache: Path) -> Case:
    """A damaged cache is named and built again, which is no failure."""
    shutil.copytree(cache, folder / "cache", ignore=shutil.ignore_patterns("xla"))
    (own,) = (folder / "cache").glob("synthetic-*")
    victim = rng.choice(sorted(own.iterdir()))
    if rng.random() < 0.5:
        victim = own / "manifest.json"
    if rng.random() < 0.3:
        victim.unlink()
        if rng.random() < 0.3:
            victim.mkdir()
    else:
        victim.write_bytes(junk(rng))
    arguments = ["augment.py", f"--config.augment.cache_dir={folder / 'cache'}", *SMALL]
    return Case(arguments, (own.name,), code=(0,))


SMALL = ["--config.dataset.num_examples=100", "--config.dataset.image_size=16"]


def run_case(folder: Path, rng: random.Random, cache: Path) -> Case:
    """A run folder whose files are something else."""
    run = folder / "run"
    run.mkdir()
    kind = rng.choice(("config", "summary", "rows", "evaluate"))
    arguments = ["train.py", f"--config.augment.cache_dir={cache}", *SMALL, f"--workdir={run}"]
    if kind == "config":
        (run / "config.json").write_bytes(junk(rng))
        return Case(arguments, ("config.json", "another config"))
    if kind == "summary":
        RunFolder(run).begin(default.get_config().to_dict())
        (run / "summary.json").write_bytes(b"[" + junk(rng))
        return Case(arguments, ("summary.json", "another config"))
    if kind == "rows":
        (run / "metrics.jsonl").write_bytes(junk(rng))
        return Case(arguments, ("metrics.jsonl",))
    (run / "config.json").write_bytes(junk(rng))
    broken = run / "checkpoints" / "00000003" / checkpoints.DESCRIPTION
    broken.parent.mkdir(parents=True)
    broken.write_bytes(junk(rng))
    return Case(["evaluate.py", run], ("no sound checkpoint",))


def make_case(number: int, seed: int, folder: Path, cache: Path) -> Case:
    """Case `number` of a seed; each in a folder of its own."""
    rng = random.Random(seed * 1000 + number)
    folder.mkdir(parents=True)
    make: Callable = (config_case, data_case, cache_case, run_case, strange_case)[number % 5]
    if make is strange_case:
        return make(folder, rng, (seed - 1) * (CASES // 5) + number // 5)
    return make(folder, rng, cache) if make in (cache_case, run_case) else make(folder, rng)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A sound cache to damage copies of."""
    folder = tmp_path_factory.mktemp("cache")
    assert run_script("augment.py", f"--config.augment.cache_dir={folder}", *SMALL).returncode == 0
    return folder


def fuzz(numbers: range, seed: int, tmp_path: Path, cache: Path) -> None:
    """Checks all cases, records how many gave one clear line, and fails if any did not."""
    clear, failed = 0, []
    for number in numbers:
        try:
            make_case(number, seed, tmp_path / str(number), cache).check()
            clear += 1
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            failed.append(f"case {number}: {failure}")
    record("fuzz", {"cases": len(numbers), "seed": seed, "one clear line": clear, "not": len(failed)})
    assert not failed, "\n\n".join(failed)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_some_malformed_input(tmp_path, cache):
    fuzz(range(10), 0, tmp_path, cache)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_much_malformed_input(seed, tmp_path, cache):
    fuzz(range(CASES), seed, tmp_path, cache)

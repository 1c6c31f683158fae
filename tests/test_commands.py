"""Every command of README, the pages and the docstrings of configs and scripts runs, as a reader's shell runs it.

A page's commands run in its order, in a copy of the project of their own; a command that several pages have runs on
the first. tests/commands_table.py says how each is shortened, or why it does not run here.
"""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from commands_table import BEFORE, FILL, PAGES, ROWS, SHORT_STUDY, SPACES, Row
from conftest import ROOT
from PIL import Image

from largebatch.hardware.targets import find_target
from largebatch.util import UserError

PROGRAMS = r"(python|\.venv/bin/python|make|pip|srun|mpirun|sha256sum) "
LIMIT_SEC = 300
# Arguments that name what is written, with the files in it.
WRITTEN = dict.fromkeys(("out", "plot", "png", "csv", "preview", "export"), ("",)) | {
    "workdir": ("config.json", "metrics.jsonl", "summary.json", "checkpoints"),
    "study": ("study.json", "trials"),
}
CLASSES = (
    *("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"),
    *("Pasture", "PermanentCrop", "Residential", "River", "SeaLake"),
)
# Of batch sizes, and of devices.
TRACE = "step,batchsize\n0,512\n200,1024\n400,1900\n599,1900\n"
DEVICES = "time,GPUs\n0,8\n20,16\n"


# ---- reading pages ----------------------------------------------------------------------------------


def lines_of(path: Path) -> list[str]:
    """Return the command lines of a page or of a Python file's docstring in their order, comments and all."""
    text = path.read_text()
    if path.suffix == ".py":
        docstring = re.sub(r"\\\n\s*", "", text.split('"""')[1])  # as it stands in the file, to be copied
        lines = [re.split(r" {2,}", line.strip())[0] for line in docstring.splitlines()]  # then what it is for
        lines = [re.sub(r" \[--[^]]*\]", "", line) for line in lines]  # may be left out
        return [line for line in lines if re.match(r"(\w+=\S+ )?python ", line)]
    lines = []
    for language, block, span in re.findall(r"^```(\w*)\n(.*?)^```$|`([^`]+)`", text, re.MULTILINE | re.DOTALL):
        if block and not language:
            lines += block.replace("\\\n", " ").splitlines()
        elif re.match(PROGRAMS, span):
            lines.append(span)
    return lines


def commands_of(page: str) -> list[str]:
    """Return the commands of a page, each once, without comments."""
    paths = sorted(ROOT.glob(page))
    lines = [re.sub(r"(^|\s+)#.*", "", line) for path in paths for line in lines_of(path)]
    return [command for command in dict.fromkeys(" ".join(line.split()) for line in lines) if command]


LONG = ("docs/results.md",)  # whose studies take minutes; with the commands of docstrings in `make test-commands`


@functools.cache
def row_of(command: str) -> Row:
    """Return the first row that matches a command."""
    for row in ROWS:
        if re.fullmatch(".*".join(map(re.escape, row.pattern.split("*"))), command):
            return row
    raise AssertionError(f"tests/commands_table.py: no row for: {command}")


def shortened(command: str) -> str:
    """Return what is run in the place of a command."""
    row, line = row_of(command), command
    for old, new in FILL.items():
        line = line.replace(old, new)
    return row.shell.format(f"{line.replace(' ...', f' {row.dots}')} {row.add}".strip())


def its_own(page: str) -> list[str]:
    """Return the commands of a page that no earlier page has, with their words in any order."""
    earlier = list(PAGES)[: list(PAGES).index(page)]
    known = [*BEFORE, *(command for page in earlier for command in commands_of(page))]
    words = {frozenset(shortened(command).split()) for command in known}
    return [command for command in commands_of(page) if frozenset(shortened(command).split()) not in words]


def promised(line: str) -> list[str]:
    """Return the files and folders that a command writes by its arguments."""
    named = re.findall(rf"--({'|'.join(WRITTEN)}) (\S+)", line)
    return [str(Path(path) / file) for flag, path in named for file in WRITTEN[flag]]


# ---- a reader's folder ------------------------------------------------------------------------------


def image_bytes(rng: np.random.Generator, suffix: str) -> bytes:
    """A random image of 8 pixels: a JPEG, or a TIFF of the 13 bands of Sentinel-2."""
    buffer = io.BytesIO()
    if suffix == ".tif":
        bands = rng.integers(0, 3000, (8, 8, 13), np.uint16)
        tifffile.imwrite(buffer, bands, photometric="minisblack", planarconfig="contig")
    else:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_zip(path: Path, folders: list[str], each: int, suffix: str = ".jpg") -> list[str]:
    """Write random images as Class/Class_N into each folder, and return their names."""
    rng, names = np.random.default_rng(0), []
    with zipfile.ZipFile(path, "w") as archive:
        for folder in folders:
            for number in range(1, each + 1):
                names.append(f"{folder}/{Path(folder).name}_{number}{suffix}")
                archive.writestr(names[-1], image_bytes(rng, suffix))
    return names


def write_data(folder: Path) -> None:
    """Write the images, lists and traces that the commands name."""
    names = write_zip(folder / "EuroSAT.zip", [f"2750/{name}" for name in CLASSES], 40)
    write_zip(folder / "EuroSAT_MS.zip", list(CLASSES), 3, ".tif")
    cifar = [f"{split}/{name}" for split in ("train", "test") for name in CLASSES]
    for name in ("CIFAR-10.zip", "CIFAR-10-jpeg.zip"):
        write_zip(folder / name, cifar, 10)
    write_zip(folder / "photos.zip", ["."], 3)
    for name, classes in (("mine", ("cats", "dogs")), ("photos", ("",))):
        for index in range(10):
            path = folder / name / classes[index % len(classes)] / f"{index}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image_bytes(np.random.default_rng(index), ".jpg"))
    splits = {name: ("val", "test")[i % 2] if i % 5 == 0 else "train" for i, name in enumerate(names)}
    ids = {name.removeprefix("2750/"): split for name, split in splits.items()}
    (folder / "FILE.csv").write_text("id,split\n" + "".join(f"{name},{split}\n" for name, split in ids.items()))
    (folder / "lists").mkdir()
    for split in ("train", "val", "test"):
        chosen = [name for name, of in ids.items() if of == split]
        (folder / "lists" / f"eurosat-{split}.txt").write_text("\n".join(chosen))
    (folder / "trace.csv").write_text(TRACE)
    (folder / "spot.csv").write_text(DEVICES)


@pytest.fixture(scope="session")
def reader(tmp_path_factory) -> Path:
    """A folder as a reader has it before the first command: the project, an environment, images."""
    folder = tmp_path_factory.mktemp("reader") / "project"
    names = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    ).splitlines()
    for name in filter(lambda name: (ROOT / name).exists(), names):  # git knows files that were deleted, too
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, kept in SPACES.items():
        with (folder / "configs" / "sweeps" / f"{name}.py").open("a") as space:
            space.write(f"\nKEPT = {kept!r}\n{SHORT_STUDY}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    here = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    (packages / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    write_data(folder)
    environment = environment_of(folder.parent / "home")
    fail_by([line for command in BEFORE for line in complaints("before all pages", command, folder, environment)])
    return folder


def environment_of(home: Path) -> dict[str, str]:
    """A reader's environment: two devices, programs compiled quickly and shared by all commands."""
    left_out = ("JAX_NUM_CPU_DEVICES", "PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    kept = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith(("PYTEST", "WANDB"))}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
    # A command that crashes in native code says where.
    return kept | {"HOME": str(home), "XLA_FLAGS": flags, "PORT": str(port), "PYTHONFAULTHANDLER": "1"}


def run(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command line, kill what it leaves running, and return its exit code and output."""
    process = subprocess.Popen(
        ["bash", "-c", f". .venv/bin/activate\n{command}"],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SEC)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"took more than {LIMIT_SEC} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def complaints(page: str, command: str, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run a command and return what is wrong with what it did."""
    row, line = row_of(command), shortened(command)
    started = time.time()
    code, output = run(line, folder, environment)
    print(f"{time.time() - started:6.1f} s  {line}", flush=True)
    wrong = [f"exit code {code}"] if code else []
    wrong += ["a traceback"] if "Traceback" in output else []
    wrong += ["failed trials"] if re.search(r"\d failed|  failed  ", output) else []  # sweep.py leaves with 0
    wrong += [f"it does not print {text!r}" for text in row.prints if text not in output]
    wrong += [f"it does not make {name}" for name in (*row.makes, *promised(line)) if not (folder / name).exists()]
    old = [name for name in row.makes if (folder / name).exists() and (folder / name).stat().st_mtime < started - 1]
    wrong += [f"it does not write {name}" for name in old]
    return [f"{page}: {command}\n  run as: {line}\n  {'; '.join(wrong)}\n{output[-1000:]}"] if wrong else []


def fail_by(wrong: list[str]) -> None:
    """Fail with what is wrong, and without lines of this file."""
    if wrong:
        pytest.fail("\n\n".join([f"{len(wrong)} commands", *wrong]), pytrace=False)


# ---- tests ------------------------------------------------------------------------------------------


def test_every_command_has_a_row_and_every_row_a_command():
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.py")]
    covered = {path for page in PAGES for path in ROOT.glob(page)}
    for path in [*files, *ROOT.glob("*.py")]:
        assert path in covered or not lines_of(path), f"{path.name}: no page of tests/commands_table.py"
    commands = {command for page in PAGES for command in commands_of(page)}
    assert {row.pattern for row in ROWS} == {row_of(command).pattern for command in commands}
    assert {*BEFORE, *(command for first in PAGES.values() for command in first)} <= commands
    text = "\n".join(commands)
    assert not [old for old in FILL if old not in text]


@pytest.mark.compilers
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", [row for row in ROWS if row.needs], ids=lambda row: row.pattern)
def test_commands_for_devices_that_are_not_here_run(row, reader, tmp_path):
    try:
        find_target(row.needs)
    except UserError as error:
        pytest.skip(str(error))
    environment = environment_of(tmp_path / "home")
    del environment["JAX_PLATFORMS"]
    commands = {command: page for page in PAGES for command in commands_of(page) if row_of(command) == row}
    fail_by([line for command, page in commands.items() for line in complaints(page, command, reader, environment)])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.commands if page.endswith(".py") or page in LONG else pytest.mark.full)
        for page in PAGES
    ],
)
def test_every_command_runs(page, reader, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(reader, folder, symlinks=True)
    environment, wrong = environment_of(tmp_path / "home"), []
    for command in [*PAGES[page], *its_own(page)]:
        if not row_of(command).skip and not row_of(command).needs:
            wrong += complaints(page, command, folder, environment)
    fail_by(wrong)

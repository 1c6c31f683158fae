"""A disk that is full wherever a run writes: a clear message, and a start resumes once there is space."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, on_devices, run_script, small_flags
from figures import record
from test_resume import assert_same_run

from largebatch.runs import checkpoints

DISK_BYTES = 40 << 20


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a tmpfs here; run as root for the disk-full tests")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def arguments(cache: Path, workdir: Path) -> list[str]:
    return [*small_flags(cache, **{"train.inner_steps": 2, "train.outer_steps": 12}), f"--workdir={workdir}"]


def fill(disk: Path, free: int) -> Path:
    """Leaves `free` bytes, or none if a run takes them meanwhile."""
    ballast = disk / "ballast"
    statistics = os.statvfs(disk)
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(statistics.f_bavail * statistics.f_frsize - free, 0)))
    return ballast


def run_on(disk: Path, command: list[str], free: int, rows: int | None) -> tuple[int, str]:
    """Runs train.py with `free` bytes left, from the start or once there are `rows` rows; exit code and stderr."""
    if rows is None:
        fill(disk, free)
    process = subprocess.Popen(
        [sys.executable, "train.py", *command],
        cwd=ROOT,
        env=on_devices(2),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if rows is not None:
        file = disk / "run" / "metrics.jsonl"
        while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= rows):
            time.sleep(0.002)
        fill(disk, free)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def check(disk: Path, tmp_path: Path, free: int, rows: int | None) -> str:
    """Runs until the disk is full, checks what is left, makes space and resumes; returns what failed."""
    run = disk / "run"
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, stderr = run_on(disk, arguments(tmp_path / "cache", run), free, rows)
    errors = [line for line in stderr.splitlines() if line.startswith("train.py: error:")]
    if code:
        assert code == 1, stderr
        assert "Traceback" not in stderr, stderr
        assert len(errors) == 1, stderr
        assert "No space left on device" in errors[0]
        assert str(run) in errors[0]
        kept = checkpoints.saved_steps(run / "checkpoints")
        assert kept or rows is None  # with rows there was a checkpoint
        for step in kept:
            checkpoints.read_arrays(checkpoints.path_of(run / "checkpoints", step))
    (disk / "ballast").unlink()
    again = run_script("train.py", *arguments(tmp_path / "cache", run))
    assert again.returncode == 0, again.stderr
    assert_same_run(run, tmp_path / "whole")
    where = errors[0].split("cannot write ")[1].split(" ")[0] if errors else "nothing"
    return Path(where).relative_to(run).parts[0] if errors and where != str(run) else where


def fill_up(disk: Path, tmp_path: Path, amounts: list[tuple[int, int | None]]) -> dict[str, int]:
    """`check` for each (free bytes, rows before); how often which place was the one that failed."""
    whole = run_script("train.py", *arguments(tmp_path / "cache", tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    found = Counter(check(disk, tmp_path, free, rows) for free, rows in amounts)
    record("disk full", {"starts": len(amounts)} | found)
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_disk_that_is_full_at_a_checkpoint(disk, tmp_path):
    assert fill_up(disk, tmp_path, [(4 << 20, None)]) == {"checkpoints": 1}


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_disk_that_fills_up_anywhere(disk, tmp_path):
    from_the_start = [(0, None), *((1 << n, None) for n in range(12, 25))]
    later = [(4096 * pages, rows) for rows in (2, 7) for pages in range(6)]
    found = fill_up(disk, tmp_path, [*from_the_start, *later])
    assert "checkpoints" in found
    assert len(found) >= 4, found


@pytest.mark.full
def test_a_disk_without_room_for_the_cache_is_named_before_anything_is_decoded(disk, tmp_path):
    fill(disk, 50_000)
    result = run_script("augment.py", *arguments(disk / "cache", tmp_path / "run")[:3])
    error = result.stderr.splitlines()[-1]  # after a warning that classes have no validation images
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert error.startswith("augment.py: error: augment.cache_dir: ")
    assert "the cache needs 0.00 GB more: make room" in error
    assert not list((disk / "cache").iterdir())

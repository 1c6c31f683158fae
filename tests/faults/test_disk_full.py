"""A disk that is full wherever a run writes: a clear message, and a start goes on once there is space."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_script
from figures import record
from test_resume import assert_same_run

from largebatch import checkpoints

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
    fields = {
        "augment.cache_dir": cache,
        "dataset.num_examples": 100,
        "dataset.image_size": 16,
        "train.inner_steps": 2,
        "train.outer_steps": 4,
    }
    return [*(f"--config.{name}={value}" for name, value in fields.items()), f"--workdir={workdir}"]


def fill(disk: Path, free: int) -> Path:
    """Leaves `free` bytes."""
    ballast = disk / "ballast"
    statistics = os.statvfs(disk)
    with ballast.open("wb") as file:
        file.write(bytes(max(statistics.f_bavail * statistics.f_frsize - free, 0)))
    return ballast


def check(disk: Path, tmp_path: Path, whole: Path, free: int, steps_before: int) -> str:
    """Runs until the disk is full, checks what is left, makes space and goes on; returns what failed."""
    run = disk / "run"
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if steps_before:  # older checkpoints, which must stay as they are
        shutil.copytree(tmp_path / "part", run)
    kept = {path: path.read_bytes() for path in run.glob("checkpoints/*/**/*") if path.is_file()}
    ballast = fill(disk, free)
    result = run_script("train.py", *arguments(tmp_path / "cache", run))
    errors = [line for line in result.stderr.splitlines() if line.startswith("train.py: error:")]
    if result.returncode:
        assert result.returncode == 1, result.stderr
        assert "Traceback" not in result.stderr, result.stderr
        assert len(errors) == 1, result.stderr
        assert "No space left on device" in errors[0]
        assert str(run) in errors[0]
        old = checkpoints.Checkpoints(run / "checkpoints", keep=1)
        for step in old.steps():
            checkpoints.check(old.path(step))
        assert all(path.read_bytes() == content for path, content in kept.items() if path.exists())
        assert not kept or old.steps()
    ballast.unlink()
    again = run_script("train.py", *arguments(tmp_path / "cache", run))
    assert again.returncode == 0, again.stderr
    assert_same_run(run, whole)
    where = errors[0].split("cannot write ")[1].split(" ")[0] if errors else "nothing"
    return Path(where).relative_to(run).parts[0] if errors and where != str(run) else where


def fill_up(disk: Path, tmp_path: Path, amounts: list[int]) -> dict[str, int]:
    """`check` for each amount of free space; how often which place was the one that failed."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert run_script("train.py", *arguments(tmp_path / "cache", whole)).returncode == 0
    command = [sys.executable, "train.py", *arguments(tmp_path / "cache", part)]
    # Stopped after its first rows, to have checkpoints.
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("outer    1"):
            process.send_signal(15)
    process.wait()
    process.stdout.close()
    stopped = json.loads((part / "events.jsonl").read_text().splitlines()[-1])
    assert stopped["event"] in ("interrupted", "done")
    found: dict[str, int] = {}
    for number, free in enumerate(amounts):
        place = check(disk, tmp_path, whole, free, steps_before=number % 2 and stopped["event"] == "interrupted")
        found[place] = found.get(place, 0) + 1
    record("disk full", {"starts": len(amounts)} | found)
    return found


@pytest.mark.timeout(600)
def test_a_disk_that_is_full_at_a_checkpoint(disk, tmp_path):
    found = fill_up(disk, tmp_path, [4 << 20])
    assert found == {"checkpoints": 1}


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_disk_that_fills_up_anywhere(disk, tmp_path):
    found = fill_up(disk, tmp_path, [0, 0, *(1 << n for n in range(12, 25) for _ in range(2))])
    assert {"checkpoints", "metrics.jsonl"} <= found.keys() or len(found) >= 3, found


@pytest.mark.timeout(300)
def test_a_disk_that_is_full_at_the_cache(disk, tmp_path):
    ballast = fill(disk, 100_000)
    result = run_script("train.py", *arguments(disk / "cache", tmp_path / "run"))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("train.py: error:")]
    assert "augment.cache_dir: cannot write" in error
    assert "No space left on device" in error
    assert not list((disk / "cache").glob("synthetic-*"))
    assert not list((disk / "cache").glob(".tmp-*"))
    ballast.unlink()
    assert run_script("train.py", *arguments(disk / "cache", tmp_path / "run")).returncode == 0

"""bench.py card: all that is worth measuring on a card, in order of worth, within some minutes.

Each measurement is a command in a process of its own, killed when its time is over. The file of --json is written
anew after each, so that a machine that goes away takes one row with it. This process touches no device.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path

from largebatch import util
from largebatch.cli import ROOT
from largebatch.runs.folder import jsonable
from largebatch.runs.load import load
from largebatch.runs.summary import code_sha256, git_commit

EUROSAT, CIFAR10 = "EuroSAT.zip", "CIFAR-10-jpeg.zip"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # in a CUDA graph a trace does not tell whose a kernel is
BATCH_SIZES = {"card": (172_800, 512, 21_600), "cpu": (512, 4_096), "tiny": (16,)}
TINY = (  # for tests: the rows are there, their figures are worth nothing
    *("--config.dataset.image_size=8", "--config.batch.size=16", "--config.schedule.warmup_steps=1"),
    *("--config.train.inner_steps=2", "--config.train.outer_steps=1"),
)


@dataclass(frozen=True)
class Measurement:
    """A command to run.

    Attributes:
      arguments: of bench.py, which gets --json; or of train.py, which gets --workdir.
      least_sec, most_sec: without the first it is not begun, after the second it is killed.
      data: file of the folder of --data that it needs.
      xla_flags: more flags of XLA.
    """

    name: str
    arguments: tuple[str, ...]
    least_sec: float
    most_sec: float
    data: str | None = None
    xla_flags: str = ""


def measurements(size: str) -> Iterator[Measurement]:
    """List all measurements in order of worth; `size` is a key of BATCH_SIZES."""
    tiny, (largest, *others) = size == "tiny", BATCH_SIZES[size]

    def step(batch: int, *more: str) -> tuple[str, ...]:
        return ("step", f"--batch_size={batch}", f"--repeats={1 if tiny else 5}", *more)

    def train(config: str, least_sec: float, seed: int = 0, data: str = EUROSAT) -> Measurement:
        arguments = (f"--config=configs/{config}.py", f"--config.seed={seed}", *(TINY if tiny else ()))
        return Measurement(f"{config} seed {seed}", ("train.py", *arguments), least_sec, 5 * least_sec, data)

    def beside_peers(batch: int, minutes: float) -> Measurement:
        arguments = step(batch, f"--minutes={0 if tiny else minutes}")
        return Measurement(f"step at {batch}", arguments, 30 * minutes, 120 * minutes)

    def kernels(batch: int) -> Measurement:
        arguments = step(batch, "--nopeers", "--kernels")
        return Measurement(f"kernels at {batch}", arguments, 30, 90, xla_flags="" if size != "card" else NO_GRAPHS)

    yield beside_peers(largest, 2.0)
    yield from (beside_peers(batch, 1.5) for batch in others[:1])
    yield train("eurosat_fast", 30)
    yield from map(kernels, (largest, *others[:1]))
    yield Measurement("start", ("compile", f"--configs={'default' if tiny else 'eurosat_v3_32'}"), 60, 150)
    yield train("eurosat_muon", 30)
    yield train("cifar10_speedrun", 30, data=CIFAR10)
    yield from (beside_peers(batch, 1.0) for batch in others[1:])
    yield train("eurosat_full_batch", 60)
    yield train("eurosat_best", 80)
    for seed in range(1, 5 if size == "card" else 1):
        yield from (train(config, 20, seed) for config in ("eurosat_fast", "eurosat_muon"))


def bench_card(minutes: float, size: str, json: str | None, data: str) -> dict:
    """Measure for so many minutes.

    Args:
      size: a key of BATCH_SIZES.
      json: path of the file that is written after each row.
      data: the folder with EuroSAT.zip and CIFAR-10-jpeg.zip; what needs a file that is not there is skipped.
    """
    end, commit = time.monotonic() + 60 * minutes, git_commit() or code_sha256()
    result = {"command": "card", "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit, "rows": []}
    with tempfile.TemporaryDirectory(prefix="largebatch-card-") as folder:
        for one in measurements(size):
            left, row = max(0.0, end - time.monotonic()), {"name": one.name, "command": " ".join(one.arguments)}
            if one.data and not (Path(data) / one.data).exists():
                row |= {"status": "skipped", "reason": f"--data: no {one.data} there"}
            elif left < one.least_sec:
                row |= {"status": "skipped", "reason": f"needs {one.least_sec:.0f} s, {left:.0f} s are left"}
            else:
                place = Path(folder) / f"{len(result['rows'])}"
                row |= measure(one, min(one.most_sec, left), place, Path(data).resolve())
            result["rows"].append(row)
            if json:
                with util.replacing(Path(json)) as temporary:
                    temporary.write_text(dumps(jsonable(result), indent=1, allow_nan=False))
            print(f"{one.name}: {row.get('reason') or row.get('error') or row['printed']}\n", flush=True)
    return result


def measure(one: Measurement, limit_sec: float, place: Path, data: Path) -> dict:
    """Run a measurement that writes to `place`; return its figures and what it printed, or the end of its error."""
    if one.arguments[0] == "train.py":
        cache = place.with_name("cache")
        places = [f"--config.dataset.path={data / one.data}", f"--config.augment.cache_dir={cache}"]
        command = [*one.arguments, *places, f"--workdir={place}"]
    else:
        command = ["bench.py", *one.arguments, f"--json={place}"]
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {one.xla_flags}".strip()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started, killed, printed = time.monotonic(), False, ("", "")
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)
    try:
        printed = process.communicate(timeout=limit_sec)  # stdout and stderr
    except subprocess.TimeoutExpired:
        killed = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.communicate()
    result = {"took_sec": time.monotonic() - started}
    if killed:
        return result | {"status": "failed", "error": f"killed after {limit_sec:.0f} s"}
    if process.returncode:
        return result | {"status": "failed", "error": (printed[1].strip().splitlines() or ["no message"])[-1][:400]}
    figures = {"summary": load(place).summary} if command[0] == "train.py" else loads(place.read_text())
    return result | {"status": "measured", "printed": printed[0].strip(), **figures}


def print_card(result: dict) -> None:
    """Count the rows; each was printed when it was measured."""
    states = [row["status"] for row in result["rows"]]
    print(", ".join(f"{states.count(state)} {state}" for state in ("measured", "skipped", "failed")))

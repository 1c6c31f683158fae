"""The run folder, its writers, and what a person sees while training."""

import contextlib
import io
import json
import logging
import math
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from rich import box, console, progress, table

from largebatch import UserError

log = logging.getLogger("largebatch")


def jsonable(value):
    """`value` with NumPy numbers as Python's and every non-finite number as None."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextlib.contextmanager
def writing(path):
    """Turns a failing disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--workdir: cannot write {path} ({error.strerror or error})") from error


def _json(content: dict) -> str:
    return json.dumps(jsonable(content), indent=1, allow_nan=False) + "\n"


class RunFolder:
    """config.json, metrics.jsonl, summary.json, predictions.npz and tensorboard/ of one run.

    Only the primary host writes. Whole files are written under a temporary name and renamed.
    """

    def __init__(self, path: str | os.PathLike, *, tensorboard: bool = True):
        self.path = Path(path).expanduser()
        self._tensorboard = tensorboard
        self._events = None

    def read(self, name: str) -> dict | None:
        """A JSON file of the folder, or None where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--workdir: {path} cannot be read ({error})") from error
        if not isinstance(content, dict):
            raise UserError(f"--workdir: {path} is not a JSON object")
        return content

    def check_new(self) -> None:
        """Makes the folder and tries it, so that a full or read-only disk is found before the work."""
        if (self.path / "metrics.jsonl").exists():
            raise UserError(f"--workdir: {self.path} holds metrics.jsonl but no config.json; give a new folder")
        self._write("probe", b"probe")
        with writing(self.path):
            (self.path / "probe").unlink()

    def create(self, config: dict) -> None:
        """Starts the folder's files; config.json first, which another run that starts here now cannot."""
        path = self.path / "config.json"
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x") as file:
                    file.write(_json(config))
            except FileExistsError as error:
                raise UserError(f"--workdir: another run has just started in {self.path}") from error
            if self._tensorboard:
                (self.path / "tensorboard").mkdir(exist_ok=True)

    def write_json(self, name: str, content: dict) -> None:
        """Writes or replaces one JSON file."""
        self._write(name, _json(content).encode())

    def write_predictions(self, labels: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> None:
        """Writes predictions.npz; the zip's CRCs guard it."""
        buffer = io.BytesIO()
        np.savez(buffer, labels=labels, logits=logits, ids=ids)
        self._write("predictions.npz", buffer.getvalue())

    def append_row(self, row: dict) -> None:
        """Adds one line to metrics.jsonl, whole or not at all, and the same numbers to TensorBoard."""
        path = self.path / "metrics.jsonl"
        row = jsonable(row)
        with writing(path), path.open("ab") as file:
            size = file.tell()
            try:
                file.write((json.dumps(row, allow_nan=False) + "\n").encode())
                file.flush()
            except OSError:
                file.truncate(size)
                raise
        if self._tensorboard:
            self._write_events(row)

    def _write_events(self, row: dict) -> None:
        # Imported only now: where PyTorch is installed it comes along, 1.5 s before the first update.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        with writing(self.path / "tensorboard"):
            if self._events is None:
                # The synchronous writer: SummaryWriter's thread would hang the run when the disk is full.
                self._events = EventsWriter(str(self.path / "tensorboard" / "events"))
            for name, value in row.items():
                if value is not None:
                    scalar = summary.scalar(name, value)
                    self._events.write_event(Event(wall_time=time.time(), step=row["step"], summary=scalar))
            self._events.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._events:
            with writing(self.path / "tensorboard"):
                self._events.close()

    def _write(self, name: str, content: bytes) -> None:
        target, temporary = self.path / name, self.path / f".{name}.tmp"
        with writing(target):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(content)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)


class Clock:
    """Seconds spent in named sections, which never overlap, and since the start."""

    def __init__(self):
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, section: str):
        """Adds the time of the block to `section`; the block must wait for its device work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[section] = self.seconds.get(section, 0.0) + time.perf_counter() - begin

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started


def empty_summary() -> dict:
    """summary.json before the first validation; `add_to_summary` fills it row by row."""
    return {
        "status": "failed",
        "best_val_accuracy": None,
        "best_step": None,
        "final_val_accuracy": None,
        "target_accuracy": None,
        "steps_to_target": None,
        "examples_to_target": None,
        "sec_to_target": None,
        "steps": 0,
        "examples_seen": 0,
        "images_per_sec": None,
        "images_per_sec_by_outer": [],
        "params_sha256": None,
    }


def timings(clock: Clock, before: dict, updates: int, batch_size: int) -> dict:
    """The time fields of a metrics row; `before` is clock.seconds as it was when the outer loop began."""
    train_sec, eval_sec = (clock.seconds[name] - before.get(name, 0.0) for name in ("train", "evaluation"))
    return {
        "images_per_sec": updates * batch_size / train_sec,
        "step_time_ms": 1e3 * train_sec / updates,
        "train_sec": train_sec,
        "eval_sec": eval_sec,
        "compile_sec": clock.seconds["compile"] if "train" not in before else 0.0,
        "wall_sec": clock.total(),
    }


def add_to_summary(summary: dict, row: dict) -> bool:
    """Brings the summary up to a new row; returns whether its validation accuracy is the best so far."""
    accuracy, target = row["val_accuracy"], summary["target_accuracy"]
    summary |= {"steps": row["step"], "examples_seen": row["examples_seen"], "final_val_accuracy": accuracy}
    summary["images_per_sec_by_outer"].append(row["images_per_sec"])
    summary["images_per_sec"] = float(np.median(summary["images_per_sec_by_outer"]))
    summary["train_sec"] = summary.get("train_sec", 0.0) + row["train_sec"]
    improved = summary["best_step"] is None or accuracy > summary["best_val_accuracy"]
    if improved:
        summary |= {"best_val_accuracy": accuracy, "best_step": row["step"]}
    if target is not None and accuracy >= target and summary["steps_to_target"] is None:
        summary |= {"steps_to_target": row["step"], "examples_to_target": row["examples_seen"]}
        summary["sec_to_target"] = summary["train_sec"]
    return improved


def versions() -> dict[str, str]:
    """Versions of what shapes the numbers."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in names}


def git_commit() -> str | None:
    """Commit of the code, with "+" when files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


class Reporter:
    """What a person sees: a progress bar and a line per outer loop on a terminal, plain lines elsewhere."""

    def __init__(self, total_updates: int, *, enabled: bool):
        width = None if sys.stdout.isatty() else 200  # a log is not cut at 80 columns
        self._console = console.Console(quiet=not enabled, highlight=False, width=width)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} updates"),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=total_updates, rate="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def advance(self, updates: int, images_per_sec: float) -> None:
        """Moves the bar by `updates`."""
        self._bar.update(self._task, advance=updates, rate=f"{images_per_sec:,.0f} images/s")

    def row(self, row: dict, outer_steps: int) -> None:
        """The line of one outer loop."""
        self.line(
            f"outer {row['outer']:>4}/{outer_steps}  step {row['step']:>6}  epoch {row['epoch']:8.2f}  "
            f"train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}  "
            f"val accuracy {row['val_accuracy']:.4f}  {row['images_per_sec']:>10,.0f} images/s  "
            f"{row['step_time_ms']:,.1f} ms/update"
        )

    def results(self, summary: dict, workdir: str) -> None:
        """The closing table."""
        out = table.Table(box=box.SIMPLE, show_header=False)
        out.add_column(no_wrap=True)
        out.add_column(overflow="fold")
        rows = {
            "status": summary["status"],
            "best val accuracy": f"{summary['best_val_accuracy']:.4f} at update {summary['best_step']}",
            "final val accuracy": f"{summary['final_val_accuracy']:.4f}",
            "updates": f"{summary['steps']:,}",
            "images seen": f"{summary['examples_seen']:,}",
            "images/s (median)": f"{summary['images_per_sec']:,.0f}",
            "seconds": "  ".join(f"{name} {sec:.1f}" for name, sec in summary["seconds"].items()),
            "devices": f"{summary['devices']} {summary['platform']}",
            "run folder": workdir,
        }
        if summary["target_accuracy"] is not None:
            reached = summary["steps_to_target"]
            rows["target"] = f"{summary['target_accuracy']:.4f} " + (
                "not reached"
                if reached is None
                else f"after {reached:,} updates, {summary['examples_to_target']:,} images, "
                f"{summary['sec_to_target']:.1f} s of training"
            )
        for name, value in rows.items():
            out.add_row(name, value)
        self._console.print(out)

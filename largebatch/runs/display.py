"""What a person sees of a run while it trains."""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable

from rich import box, console, live, progress, table, text

from largebatch.errors import printable


def _four_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


class _Escaped(logging.Formatter):
    """Messages as they are, but for characters that would steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(record.getMessage())  # one line; a traceback has its own
        text = self.formatMessage(record)
        if record.exc_info:
            text += "\n" + "\n".join(map(printable, self.formatException(record.exc_info).split("\n")))
        return text


def log_to_stderr() -> None:
    """Shows warnings on stderr, without anything around them."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaped("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _Console(console.Console):
    """Goes quiet when nobody reads any more (`| head`, a `| tee` that Ctrl-C ended), which rich exits at."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Reporter:
    """What a person sees: a progress bar and a line per outer loop on a terminal, plain lines elsewhere."""

    def __init__(self, *, enabled: bool):
        width = None if sys.stdout.isatty() else 200  # a log is not cut at 80 columns
        self._console = _Console(quiet=not enabled, highlight=False, width=width)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} updates"),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", rate="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def start(self, total_updates: int, step: int, headline: str) -> None:
        """Before the first update, which is number `step` of `total_updates`."""
        self.line(headline)
        self._bar.update(self._task, total=total_updates, completed=step)

    def line(self, text: str) -> None:
        """Prints one line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def at(self, step: int, images_per_sec: float) -> None:
        """Moves the bar to update `step`."""
        self._bar.update(self._task, completed=step, rate=f"{images_per_sec:,.0f} images/s")

    def row(self, row: dict, outer_steps: int) -> None:
        """The line of one outer loop."""
        self.line(
            f"outer {row['outer']:>4}/{outer_steps}  step {row['step']:>6}  epoch {row['epoch']:8.2f}  "
            f"train loss {_four_digits(row['train_loss'])}  val loss {row['val_loss']:.4f}  "
            f"val accuracy {row['val_accuracy']:.4f}{_others(row)}  {row['images_per_sec']:>10,.0f} images/s  "
            f"{row['step_time_ms']:,.1f} ms/update{_noise(row)}"
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
            "beside it": _others(summary["final_others"]).strip(" ()"),
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
            if value:
                out.add_row(name, value)
        self._console.print(out)


def _others(row: dict) -> str:
    """The validation accuracies beside the plain one, as " (views 0.9500, ema 0.9400)"."""
    prefix = "val_accuracy_"
    found = [f"{name.removeprefix(prefix)} {row[name]:.4f}" for name in row if name.startswith(prefix)]
    return f" ({', '.join(found)})" if found else ""


def _noise(row: dict) -> str:
    """How the batch stands to the gradient's noise scale, where it was measured."""
    scale, size = row["noise_scale"], row["global_batch_size"]
    if not scale:
        return ""
    if math.isinf(scale):
        return "  batch is far below the critical batch"
    ratio = size / scale
    times = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"  batch is {times} x the critical batch"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table of texts; numbers to the right."""
    out = table.Table(box=box.SIMPLE)
    for name, cells in zip(header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True):
        numbers = all(
            cell.replace(".", "", 1).replace("-", "").replace("e", "").isdigit() for cell in cells if cell
        )
        out.add_column(text.Text(printable(name)), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        out.add_row(*(text.Text(printable(cell)) for cell in row))
    _Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(out)


class SweepTable:
    """What a person sees of a study: a live table of trials on a terminal, a line per start and end elsewhere.

    Args:
      counts: () -> trials waiting, running and ended, of all processes.
    """

    SHOWN = 12

    def __init__(self, name: str, counts: Callable[[], tuple[int, int, int]], *, enabled: bool):
        self._name, self._counts, self._started = name, counts, time.monotonic()
        self._console = _Console(quiet=not enabled, highlight=False, width=None if sys.stdout.isatty() else 200)
        self._trials: dict[str, dict] = {}  # of this process, in the order of their start
        self._lock = threading.Lock()
        self._live = live.Live(
            get_renderable=self._render, console=self._console, refresh_per_second=2, redirect_stderr=False
        )

    def __enter__(self):
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._console.is_terminal:
            self._live.stop()

    def start(self, name: str, values: dict, total_updates: int, step: int) -> None:
        """A trial has begun, at update `step`."""
        shown = "  ".join(f"{field.rpartition('.')[2]} {_short(value)}" for field, value in values.items())
        trial = {"values": shown, "total": total_updates, "first": step, "step": step, "since": time.monotonic()}
        with self._lock:
            self._trials[name] = trial | {"status": "running", "accuracy": None, "rate": None}
        self._line(f"trial {name}  {shown}  started at update {step} of {total_updates}")

    def at(self, name: str, step: int, images_per_sec: float) -> None:
        """A trial has done update `step`."""
        with self._lock:
            self._trials[name] |= {"step": step, "rate": images_per_sec}

    def row(self, name: str, row: dict) -> None:
        """A trial was validated."""
        with self._lock:
            trial = self._trials[name]
            trial["accuracy"] = max(trial["accuracy"] or 0.0, row["val_accuracy"])

    def end(self, name: str, summary: dict) -> None:
        """A trial has ended; `summary` has its status, and its accuracy or error."""
        error, accuracy = summary.get("error"), summary.get("best_val_accuracy")
        with self._lock:
            trial = self._trials.setdefault(name, {"values": "", "total": 1, "first": 0, "step": 1, "rate": None})
            trial |= {"status": summary["status"], "accuracy": accuracy}
            seconds = time.monotonic() - trial.get("since", time.monotonic())
        result = error or f"best val accuracy {_four_digits(accuracy)}"
        self._line(
            f"trial {name}  {trial['values']}  {summary['status']}  {result}  {seconds:.1f} s; {self._left()}"
        )

    def _line(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, markup=False, soft_wrap=True)

    def _left(self) -> str:
        waiting, running, ended = self._counts()
        with self._lock:
            trials = list(self._trials.values())
        done = sum(
            1 - t["first"] / t["total"] if t["status"] != "running" else (t["step"] - t["first"]) / t["total"]
            for t in trials
        )
        total = waiting + running + ended
        left = waiting + sum(1 - t["step"] / t["total"] for t in trials if t["status"] == "running")
        shown = f"{ended} of {total} trials ended"
        if done < 0.2 or not left:
            return shown
        return f"{shown}, about {_duration(left * (time.monotonic() - self._started) / done)} left"

    def _render(self) -> table.Table:
        out = table.Table(box=box.SIMPLE, title=f"{self._name}: {self._left()}", title_justify="left")
        for column in ("trial", "setting", "status", "updates", "val accuracy", "images/s"):
            out.add_column(column, justify="left" if column in ("trial", "setting", "status") else "right")
        with self._lock:
            shown = list(self._trials.items())[-self.SHOWN :]
        for name, trial in shown:
            status, running = trial["status"], trial["status"] == "running"
            bar = (
                progress.ProgressBar(total=trial["total"], completed=trial["step"], width=12) if running else status
            )
            out.add_row(
                name,
                text.Text(trial["values"]),
                bar,
                f"{trial['step']:,}/{trial['total']:,}",
                "" if trial["accuracy"] is None else _four_digits(trial["accuracy"]),
                "" if trial["rate"] is None else f"{trial['rate']:,.0f}",
            )
        return out


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )

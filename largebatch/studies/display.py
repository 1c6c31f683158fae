"""What a person sees of a study while it runs."""

import sys
import threading
import time
from collections.abc import Callable

from rich import box, live, progress, table, text

from largebatch.terminal import Console, duration, four_digits


class SweepTable:
    """What a person sees of a study: a live table of trials on a terminal, a line per start and end elsewhere.

    Args:
      counts: () -> trials waiting, running and ended, of all processes.
    """

    SHOWN = 12

    def __init__(self, name: str, counts: Callable[[], tuple[int, int, int]], *, enabled: bool):
        self._name, self._counts, self._started = name, counts, time.monotonic()
        self._console = Console(quiet=not enabled, highlight=False, width=None if sys.stdout.isatty() else 200)
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
        result = error or f"best val accuracy {four_digits(accuracy)}"
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
        return f"{shown}, about {duration(left * (time.monotonic() - self._started) / done)} left"

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
                "" if trial["accuracy"] is None else four_digits(trial["accuracy"]),
                "" if trial["rate"] is None else f"{trial['rate']:,.0f}",
            )
        return out


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

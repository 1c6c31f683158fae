"""Terminal display of a study while it runs."""

import time
from collections.abc import Callable

from rich import progress

from largebatch.studies.queue import Counts
from largebatch.tasks.kinds import TaskKind
from largebatch.terminal import Console, duration, four_digits
from largebatch.util import printable


class SweepDisplay:
    """Display of a study: a line per start and end of a trial, and on a terminal bars of the study and the trial.

    Args:
      kind: kind of the task of its trials.
      counts: function that returns the waiting, running and ended trials of all processes.
      enabled: False to show nothing.
    """

    def __init__(self, name: str, kind: TaskKind, counts: Callable[[], Counts], *, enabled: bool):
        self._kind, self._counts, self._score = kind, counts, None
        self._console = Console(enabled=enabled)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
            progress.TextColumn("{task.fields[shown]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._study = self._bars.add_task(printable(name), total=None, unit="trials", shown="")
        self._trial = self._bars.add_task("", total=None, unit="steps", shown="")
        self._started = time.monotonic()

    def __enter__(self):
        self._bars.start()
        return self

    def __exit__(self, *_):
        self._bars.stop()

    def start(self, name: str, total_steps: int, step: int) -> None:
        """Show that a trial has begun, at `step`."""
        self._score, self._started = None, time.monotonic()
        self._show_counts()
        self._bars.reset(
            self._trial, description=printable(name), total=total_steps, completed=step, unit="steps", shown=""
        )
        self._console.print(f"trial {name}  started at step {step} of {total_steps}", soft_wrap=True)

    def at(self, step: int, images_per_sec: float) -> None:
        """Move the trial's bar to `step`."""
        score = "" if self._score is None else f"val {self._kind.score_words} {four_digits(self._score)}  "
        self._bars.update(self._trial, completed=step, shown=f"{score}{images_per_sec:,.0f} images/s")

    def row(self, score: float | None) -> None:
        """Show the score of a validation of the trial."""
        self._score = self._kind.best([self._score, score])

    def end(self, name: str, status: str, score: float | None, error: str | None = None) -> None:
        """Show that a trial has ended, with its best score or an error."""
        result = error or f"best val {self._kind.score_words} {four_digits(score)}"
        seconds = duration(time.monotonic() - self._started)
        ended = self._show_counts(now_ended=1)
        self._console.print(f"trial {name}  {status}  {result}  {seconds}; {ended}", soft_wrap=True)

    def _show_counts(self, now_ended: int = 0) -> str:
        """Move the study's bar; return how many trials have ended.

        Args:
          now_ended: trials that have ended since the queue was filled.
        """
        counts = self._counts()
        ended = min(counts.ended + now_ended, counts.total)
        self._bars.update(self._study, completed=ended, total=counts.total)
        return f"{ended} of {counts.total} trials ended"

"""Terminal display of a study while it runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich import box, live, progress, table

from largebatch.studies.queue import Counts
from largebatch.tasks.kinds import TaskKind
from largebatch.terminal import Console, duration, four_digits

SHOWN_TRIALS = 12
TOO_EARLY = 0.2  # trials that this process must have done before a time is estimated


@dataclass
class _TrialLine:
    """Table line of one trial of this process.

    Attributes:
      values: values of its setting, as text.
      first_update: step from which this process trains the trial.
      started_at: time.monotonic() at that step.
    """

    values: str
    total_updates: int
    first_update: int
    update: int
    started_at: float
    status: str = "running"
    score: float | None = None
    images_per_sec: float | None = None

    @property
    def done(self) -> float:
        """Fraction of a whole trial that this process did; an ended trial counts to its end, even if pruned."""
        last_update = self.update if self.status == "running" else self.total_updates
        return (last_update - self.first_update) / self.total_updates

    @property
    def left(self) -> float:
        """Fraction of the trial that is still to do."""
        return (self.total_updates - self.update) / self.total_updates if self.status == "running" else 0.0


class SweepTable:
    """Display of a study: a live table of trials on a terminal, a line per start and end elsewhere.

    Args:
      name: name of the study.
      kind: kind of the task of its trials.
      counts: function that returns the waiting, running and ended trials of all processes.
      enabled: False to show nothing.
    """

    def __init__(self, name: str, kind: TaskKind, counts: Callable[[], Counts], *, enabled: bool):
        self._name, self._kind, self._counts, self._started = name, kind, counts, time.monotonic()
        self._console = Console(enabled=enabled)
        self._trials: dict[str, _TrialLine] = {}  # this process's trials, by start
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
        """Show that a trial has begun, at `step`."""
        shown = "  ".join(f"{field.rpartition('.')[2]} {_short(value)}" for field, value in values.items())
        self._trials[name] = _TrialLine(shown, total_updates, step, step, time.monotonic())
        self._print_line(f"trial {name}  {shown}  started at update {step} of {total_updates}")

    def at(self, name: str, step: int, images_per_sec: float) -> None:
        """Move a trial's bar to `step`."""
        self._trials[name].update = step
        self._trials[name].images_per_sec = images_per_sec

    def row(self, name: str, row: dict) -> None:
        """Show the score of a trial's validation."""
        trial = self._trials[name]
        trial.score = self._kind.best([trial.score, row["val_score"]])

    def end(self, name: str, status: str, score: float | None, error: str | None = None) -> None:
        """Show that a trial has ended, with its best score or an error."""
        now = time.monotonic()
        if name not in self._trials:  # a trial that had ended before, or failed before its start
            self._trials[name] = _TrialLine("", total_updates=1, first_update=0, update=1, started_at=now)
        trial = self._trials[name]
        trial.status, trial.score = status, score
        result = error or f"best val {self._kind.score_words} {four_digits(score)}"
        seconds = now - trial.started_at
        self._print_line(
            f"trial {name}  {trial.values}  {status}  {result}  {seconds:.1f} s; {self._summary_of_study()}"
        )

    def _print_line(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)

    def _summary_of_study(self) -> str:
        """Return how many trials have ended, and about how long the rest will take this process."""
        counts = self._counts()
        done = sum(trial.done for trial in self._trials.values())
        left = counts.waiting + sum(trial.left for trial in self._trials.values())
        shown = f"{counts.ended} of {counts.total} trials ended"
        if done < TOO_EARLY or not left:
            return shown
        seconds_per_trial = (time.monotonic() - self._started) / done
        return f"{shown}, about {duration(left * seconds_per_trial)} left"

    def _render(self) -> table.Table:
        out = table.Table(box=box.SIMPLE, title=f"{self._name}: {self._summary_of_study()}", title_justify="left")
        for column in ("trial", "setting", "status"):
            out.add_column(column, justify="left")
        for column in ("updates", f"val {self._kind.score_words}", "images/s"):
            out.add_column(column, justify="right")
        shown = list(self._trials.items())[-SHOWN_TRIALS:]
        for name, trial in shown:
            status = trial.status
            if status == "running":
                status = progress.ProgressBar(total=trial.total_updates, completed=trial.update, width=12)
            out.add_row(
                name,
                trial.values,
                status,
                f"{trial.update:,}/{trial.total_updates:,}",
                "" if trial.score is None else four_digits(trial.score),
                "" if trial.images_per_sec is None else f"{trial.images_per_sec:,.0f}",
            )
        return out


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

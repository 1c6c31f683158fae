"""Training of one trial: a run of train.py in the study's folder that reports to its queue and table."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from largebatch.hosts import collectives, preemption
from largebatch.runs.display import Reporter
from largebatch.runs.folder import RunFolder
from largebatch.runs.lifecycle import Diverged, Pruned
from largebatch.runs.reader import read_run
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import ClaimedTrial, TrialQueue, TrialSpec
from largebatch.studies.study import Study
from largebatch.util import BadSetting


@dataclass(frozen=True)
class AssignedTrial:
    """Trial that all hosts train together; host 0 claimed it from the queue, on the others `claimed` is None."""

    spec: TrialSpec
    claimed: ClaimedTrial | None


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial that has ended.

    Attributes:
      status: "done", "pruned", "diverged" or "failed". Hosts other than host 0 have only "failed" and "done".
      summary: the run's summary.json on host 0; empty on the others, and if the trial failed.
      error: reason of the failure, in one line.
    """

    status: str
    summary: dict = field(default_factory=dict)
    error: str | None = None


class TrialReporter(Reporter):
    """Reporter of a trial's progress to the table and the queue, without a progress bar; it prunes the trial."""

    def __init__(self, study: Study, trial: AssignedTrial, queue: TrialQueue | None, table: SweepTable):
        self._study, self._queue, self._table = study, queue, table
        self._spec, self._claimed = trial.spec, trial.claimed
        self._prunes = study.pruner != "none"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, total_updates: int, step: int, headline: str) -> None:
        """Show the trial; report the validations of an earlier process to the pruner."""
        self._table.start(self._spec.name, self._spec.values, total_updates, step)
        if self._prunes:
            earlier_rows = read_run(self._study.folder_of(self._spec)).rows if self._claimed else []
            self._report_to_queue(earlier_rows)

    def at(self, step: int, images: int, seconds: float, images_left: int) -> None:
        """Move the trial's bar to `step`."""
        self._table.at(self._spec.name, step, images / seconds)

    def row(self, row: dict, outer_steps: int) -> None:
        """Show a validation and query the pruner, except after the last, which ends the run anyway.

        Raises:
          Pruned: the pruner ends the trial; on all hosts.
        """
        self._table.row(self._spec.name, row)
        if not self._prunes:
            return
        should_prune = self._report_to_queue([row])
        if should_prune and row["outer"] < outer_steps:
            raise Pruned(f"pruned after outer loop {row['outer']} ({self._study.pruner})")

    def results(self, summary: dict, workdir: str) -> None:
        """Do nothing: the table shows the results."""

    def _report_to_queue(self, rows: list[dict]) -> bool:
        """Report validations to the queue; return True if the pruner would end the trial after the last of them.

        Collective: only host 0 talks to the database, and the other hosts wait for its answer.

        Raises:
          preemption.Stopped: a signal came while the database was away; on all hosts.
        """
        should_prune, signal = False, 0
        if self._claimed:
            try:
                for row in rows:
                    should_prune = self._queue.report(self._claimed, row["val_score"], row["outer"])
            except preemption.Stopped as stopped:
                signal = stopped.number
        answer = collectives.json_from_primary({"should_prune": bool(should_prune), "signal": signal})
        if answer["signal"]:
            raise preemption.Stopped(answer["signal"])
        return answer["should_prune"]


def train_trial(study: Study, spec: TrialSpec, *, train: Callable, cache, reporter: TrialReporter) -> TrialResult:
    """Train or resume one trial; a setting that does not work gives a failed result.

    Args:
      train: `train.train_and_evaluate`.
      cache: programs and data that trials share, passed on to `train`.
    Raises:
      InUse: another process trains the trial.
      preemption.Stopped: a signal came.
    """
    folder = RunFolder(study.folder_of(spec))
    record = {"index": spec.setting, "seed": spec.seed, "setting": spec.values, "error": None}
    try:
        config = collectives.agreed(lambda: study.config_of(spec.values, spec.seed))
        collectives.agreed(lambda: folder.write_json("trial.json", record), collectives.is_primary())
        with contextlib.suppress(Diverged, Pruned):  # recorded in the summary
            train(config, str(folder.path), shared=cache, report=reporter)
    except (BadSetting, jax.errors.JaxRuntimeError) as error:
        if not _is_due_to_setting(error):
            raise
        record["error"] = str(error).splitlines()[0]
        collectives.agreed(lambda: folder.write_json("trial.json", record), collectives.is_primary())
        return TrialResult("failed", error=record["error"])
    if not collectives.is_primary():
        return TrialResult("done")
    summary = folder.read("summary.json")
    return TrialResult(summary["status"], summary)


def _is_due_to_setting(error: Exception) -> bool:
    """Return True if a setting is not allowed or needs too much memory, so that another one might work."""
    return isinstance(error, BadSetting) or "RESOURCE_EXHAUSTED" in str(error)

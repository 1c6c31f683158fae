"""One trial of a study: a run of train.py in the study's folder, whose queue and table are told how it goes."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from largebatch.hosts import collectives, preemption
from largebatch.runs.display import Reporter
from largebatch.runs.folder import RunFolder
from largebatch.runs.lifecycle import Diverged, Pruned
from largebatch.runs.reader import read_run, score_of
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import ClaimedTrial, TrialQueue, TrialSpec
from largebatch.studies.study import Study
from largebatch.util import BadSetting


@dataclass(frozen=True)
class AssignedTrial:
    """A trial that all hosts train together. Host 0 claimed it from the queue; on the others `claimed` is None."""

    spec: TrialSpec
    claimed: ClaimedTrial | None


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended.

    Attributes:
      status: "done", "pruned", "diverged" or "failed". Hosts other than host 0 know only "failed" from "done".
      summary: the run's summary.json on host 0; empty on the others, and where the trial failed.
      error: why it failed, in one line.
    """

    status: str
    summary: dict = field(default_factory=dict)
    error: str | None = None


class TrialReporter(Reporter):
    """Tells the table and the queue how a trial goes, in place of the usual progress bar; prunes the trial."""

    def __init__(self, study: Study, trial: AssignedTrial, queue: TrialQueue | None, table: SweepTable):
        self._study, self._queue, self._table = study, queue, table
        self._spec, self._claimed = trial.spec, trial.claimed
        self._prunes = study.pruner != "none"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, total_updates: int, step: int, headline: str) -> None:
        """Shows the trial; tells the pruner of the validations that an earlier process did."""
        self._table.start(self._spec.name, self._spec.values, total_updates, step)
        if self._prunes:
            earlier_rows = read_run(self._study.folder_of(self._spec)).rows if self._claimed else []
            self._report_to_queue(earlier_rows)

    def at(self, step: int, images: int, seconds: float, images_left: int) -> None:
        """Move the trial's bar to update `step`."""
        self._table.at(self._spec.name, step, images / seconds)

    def row(self, row: dict, outer_steps: int) -> None:
        """Shows a validation and asks the pruner. The last validation ends the run anyway.

        Raises:
          Pruned: on all hosts.
        """
        self._table.row(self._spec.name, row)
        if not self._prunes:
            return
        should_prune = self._report_to_queue([row])
        if should_prune and row["outer"] < outer_steps:
            raise Pruned(f"pruned after outer loop {row['outer']} ({self._study.pruner})")

    def results(self, summary: dict, workdir: str) -> None:
        """Nothing: the table shows them."""

    def _report_to_queue(self, rows: list[dict]) -> bool:
        """Tells the queue of validations; returns whether the pruner would end the trial after the last of them.

        All hosts call this together: only host 0 talks to the database, and the others wait for its answer.

        Raises:
          preemption.Stopped: a signal came while the database was away; on all hosts.
        """
        should_prune, signal = False, 0
        if self._claimed:
            try:
                for row in rows:
                    should_prune = self._queue.report(self._claimed, score_of(row), row["outer"])
            except preemption.Stopped as stopped:
                signal = stopped.number
        answer = collectives.json_from_primary({"should_prune": bool(should_prune), "signal": signal})
        if answer["signal"]:
            raise preemption.Stopped(answer["signal"])
        return answer["should_prune"]


def train_trial(study: Study, spec: TrialSpec, *, train: Callable, cache, reporter: TrialReporter) -> TrialResult:
    """Trains one trial, from where it stands. A setting that does not work gives a failed result.

    Args:
      train: `train.train_and_evaluate`.
      cache: the programs and data that trials share; handed on to `train`.
    Raises:
      InUse: another process trains it.
      preemption.Stopped: a signal came.
    """
    folder = RunFolder(study.folder_of(spec))
    record = {"index": spec.setting, "seed": spec.seed, "setting": spec.values, "error": None}
    try:
        config = collectives.agreed(lambda: study.config_of(spec.values, spec.seed))
        collectives.agreed(lambda: folder.write_json("trial.json", record), collectives.is_primary())
        with contextlib.suppress(Diverged, Pruned):  # the summary says so
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
    """Whether another setting might work: this one is not allowed, or needs too much memory."""
    return isinstance(error, BadSetting) or "RESOURCE_EXHAUSTED" in str(error)

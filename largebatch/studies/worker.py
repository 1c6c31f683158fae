"""Worker process of a study, which claims trials from the queue and trains them until none is left."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable

import jax

from largebatch.hosts import collectives, preemption
from largebatch.runs.display import Reporter
from largebatch.runs.folder import InUse, RunFolder
from largebatch.runs.lifecycle import Diverged, Pruned
from largebatch.runs.reader import read_run
from largebatch.studies.queue import Trial, TrialQueue
from largebatch.studies.study import Study
from largebatch.terminal import Console, duration, four_digits
from largebatch.util import BadSetting, UserError

log = logging.getLogger("largebatch")

MAX_FAILURES = 3  # maximum consecutive failures: then the cause is not the trials' settings
POLL_SEC = 2.0


# Around calls that wait for the database: a signal that reached host 0 in a wait stops all hosts where they next
# agree on signals, not host 0 alone.
STOPS_WITH_THE_OTHERS = contextlib.suppress(preemption.Stopped)


class Worker:
    """Worker that trains trials until none is left; host 0 has the queue, and all hosts train its trials.

    Args:
      queue: queue on host 0; None on the other hosts.
      train: `train.train_and_evaluate`.
      cache: programs and data that trials share, passed on to `train`.
    """

    def __init__(self, study: Study, queue: TrialQueue | None, *, train: Callable, cache: object):
        self._study, self._queue, self._train, self._cache = study, queue, train, cache
        self._console = Console(enabled=queue is not None)
        self._num_failures = 0  # in a row

    def run(self) -> None:
        """Train all trials that this process gets.

        Raises:
          UserError: several trials in a row failed.
          preemption.Stopped: a signal came; the running trial is saved and put back.
        """
        while trial := self._next_trial():
            try:
                with self._queue.beating(trial) if self._queue else contextlib.nullcontext():
                    self._train_one(trial)
            except InUse as busy:
                log.info("%s; it comes again later", busy)
                time.sleep(POLL_SEC)

    def _next_trial(self) -> Trial | None:
        """Return the trial that host 0 claimed, on every host; None once all runs of the study have ended.

        While other processes run the last trials, the worker waits: if one dies, its trial is enqueued again.

        Raises:
          preemption.Stopped: on all hosts, if any of them got a signal.
        """
        has_waited = False
        while True:
            claimed = None
            with STOPS_WITH_THE_OTHERS:
                claimed = self._queue.claim() if self._queue and self._queue.fill().waiting else None
            signal, _ = preemption.agree()
            if signal:
                if claimed:
                    self._queue.put_back(claimed)
                raise preemption.Stopped(signal)
            from_host_0 = collectives.json_from_primary(
                {
                    "trial": claimed and dataclasses.asdict(dataclasses.replace(claimed, row=None)),
                    "left": self._queue.counts.left if self._queue else 0,
                }
            )
            if from_host_0["trial"]:
                return claimed or Trial(**from_host_0["trial"])
            if not from_host_0["left"]:
                return None
            if not has_waited:
                log.info("waiting for trials of other processes, or of a killed one")
                has_waited = True
            time.sleep(POLL_SEC)

    def _train_one(self, trial: Trial) -> None:
        """Train or resume a trial and end it in the queue.

        Raises:
          InUse: another process trains the trial.
          UserError: the trial failed, as the trials before it did.
          preemption.Stopped: a signal came.
        """
        folder = RunFolder(self._study.folder_of(trial.setting, trial.seed))
        begin = time.monotonic()
        status, summary, error = self._result_of(trial, folder)
        if self._queue:
            with STOPS_WITH_THE_OTHERS:
                self._queue.end(trial, status, self._value_of(status, summary), error)
            result = error or f"best val {self._study.kind.score_words} {four_digits(summary.get('best_score'))}"
            self._show_end(folder.path.name, status, result, time.monotonic() - begin)
        self._num_failures = self._num_failures + 1 if error else 0
        if self._num_failures >= MAX_FAILURES:
            raise UserError(f"{self._num_failures} trials in a row failed, the last one: {error}")

    def _show_end(self, name: str, status: str, result: str, seconds: float) -> None:
        counts = self._queue.counts  # counted before this trial ended
        ended = f"{min(counts.ended + 1, counts.total)} of {counts.total} trials ended"
        self._console.print(f"trial {name}  {status}  {result}  {duration(seconds)}; {ended}", soft_wrap=True)

    def _result_of(self, trial: Trial, folder: RunFolder) -> tuple[str, dict, str | None]:
        """Train a trial; return its status, its summary on host 0, and in one line why it failed, if it did."""
        record = {"index": trial.index, "seed": trial.seed, "setting": trial.setting, "error": None}
        reporter = TrialReporter(self._study, trial, self._queue)
        try:
            config = collectives.agreed(lambda: self._study.config_of(trial.setting, trial.seed))
            collectives.agreed(lambda: folder.write_json("trial.json", record), collectives.is_primary())
            with contextlib.suppress(Diverged, Pruned):  # recorded in the summary
                self._train(config, str(folder.path), shared=self._cache, report=reporter)
        except (BadSetting, jax.errors.JaxRuntimeError) as error:
            # Another setting may be allowed, or need less memory.
            if not isinstance(error, BadSetting) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            record["error"] = str(error).splitlines()[0]
            collectives.agreed(lambda: folder.write_json("trial.json", record), collectives.is_primary())
            return "failed", {}, record["error"]
        summary = folder.read("summary.json") if collectives.is_primary() else {}
        return summary.get("status", "done"), summary, None

    def _value_of(self, status: str, summary: dict) -> float | None:
        """Return the value by which the study ranks a trial, the worst one if a target was not reached."""
        if status == "failed":
            return None
        value = summary["best_score" if status == "pruned" else self._study.options.objective]
        if value is not None:
            return value
        return -math.inf if self._study.maximizes else math.inf


class TrialReporter(Reporter):
    """Reporter of a trial: a line at its start, and a bar; validations go to the queue, which prunes the trial."""

    def __init__(self, study: Study, trial: Trial, queue: TrialQueue | None):
        super().__init__(study.kind, enabled=queue is not None)
        self._study, self._trial, self._queue = study, trial, queue
        self._folder = study.folder_of(trial.setting, trial.seed)
        self._prunes = study.options.pruner != "none"

    def start(self, total_steps: int, step: int, headline: str) -> None:
        """Show that the trial begins; report the validations of an earlier process to the pruner."""
        super().start(total_steps, step, f"trial {self._folder.name}  started at step {step} of {total_steps}")
        if self._prunes:
            self._report_to_queue(read_run(self._folder).rows if self._queue else [])

    def row(self, row: dict, outer_steps: int) -> None:
        """Query the pruner about a validation, except the last, which ends the run anyway.

        Raises:
          Pruned: the pruner ends the trial; on all hosts.
        """
        if self._prunes and self._report_to_queue([row]) and row["outer"] < outer_steps:
            raise Pruned(f"pruned after outer loop {row['outer']} ({self._study.options.pruner})")

    def results(self, summary: dict, workdir: str) -> None:
        """Show nothing: the worker has a line for each trial."""

    def _report_to_queue(self, rows: list[dict]) -> bool:
        """Report validations to the queue; return True if the pruner would end the trial after the last.

        Collective: only host 0 talks to the database, and the other hosts wait for its answer.
        """
        should_prune = False
        with STOPS_WITH_THE_OTHERS:
            for row in rows if self._queue else ():
                should_prune = self._queue.report(self._trial, row["val_score"], row["outer"])
        return collectives.json_from_primary(bool(should_prune))

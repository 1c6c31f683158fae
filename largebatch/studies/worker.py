"""Worker process of a study, which claims trials from the queue and trains them until none is left."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable

from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import InUse, RunFolder, writing
from largebatch.studies.database import open_storage
from largebatch.studies.display import SweepTable
from largebatch.studies.queue import ClaimedTrial, TrialQueue, TrialSpec
from largebatch.studies.search import create_pruner
from largebatch.studies.study import Study, identity
from largebatch.studies.trial import AssignedTrial, TrialReporter, TrialResult, train_trial
from largebatch.util import UserError

log = logging.getLogger("largebatch")

MAX_FAILURES = 3  # maximum consecutive failures: then the cause is not the trials' settings
POLL_SEC = 2.0


def open_queue(study: Study) -> TrialQueue:
    """Open the study's trials in its database, and then write study.json.

    Raises:
      UserError: the database cannot be opened, or holds another study of this name.
    """
    if study.storage.startswith(f"sqlite:///{study.path.resolve()}"):
        with writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
    # The description omits the storage: another machine may reach the same database by another URL.
    description = identity(study.description)
    del description["storage"]
    queue = TrialQueue(
        open_storage(study.storage, study.heartbeat_sec),
        study.path.name,
        study.search,
        direction="maximize" if study.maximizes else "minimize",
        pruner=create_pruner(study.pruner, study.groups, study.kind),
        heartbeat_sec=study.heartbeat_sec,
        description=description,
    )
    folder = RunFolder(study.path)
    if folder.read("study.json") != study.description:
        folder.write_json("study.json", study.description)
    return queue


class Worker:
    """Worker that trains trials until none is left; host 0 has the queue, and all hosts train its trials.

    Args:
      queue: queue on host 0; None on the other hosts.
      train: `train.train_and_evaluate`.
      cache: programs and data that trials share, passed on to `train`.
    """

    def __init__(
        self,
        study: Study,
        queue: TrialQueue | None,
        table: SweepTable,
        *,
        train: Callable,
        cache,
    ):
        self._study, self._queue, self._table = study, queue, table
        self._train, self._cache = train, cache
        self._failures_in_a_row = 0
        self._signal = 0  # signal that this host got while it trained, or 0

    def run(self) -> None:
        """Train all trials that this process gets.

        Raises:
          UserError: several trials in a row failed.
          preemption.Stopped: a signal came; the running trial is saved and put back.
        """
        while trial := self._next_trial():
            try:
                self._train_one(trial)
            except InUse as busy:
                log.info("%s; it comes again later", busy)
                time.sleep(POLL_SEC)
            except preemption.Stopped as stopped:
                self._signal = stopped.number  # all hosts leave together, in `_next_trial`
            finally:
                self._put_back(trial)

    # ---- claims -------------------------------------------------------------------------------------

    def _next_trial(self) -> AssignedTrial | None:
        """Return the trial that host 0 claimed, on every host; None once all runs of the study have ended.

        While other processes run the last trials, the worker waits: if one dies, its trial is enqueued again.

        Raises:
          preemption.Stopped: on all hosts, if any of them got a signal.
        """
        said_so = False
        while True:
            claimed = self._claim_trial() if self._queue else None
            host_0 = collectives.json_from_primary(
                {
                    "spec": dataclasses.asdict(claimed.spec) if claimed else None,
                    "left": self._queue.counts.left if self._queue else 0,
                    "signal": self._signal,
                }
            )
            signal = host_0["signal"] or preemption.agree()[0]
            if signal:
                if claimed:
                    self._queue.put_back(claimed)
                raise preemption.Stopped(signal)
            if host_0["spec"]:
                return AssignedTrial(TrialSpec(**host_0["spec"]), claimed)
            if not host_0["left"]:
                return None
            if not said_so:
                log.info("waiting for trials of other processes, or of a killed one")
                said_so = True
            time.sleep(POLL_SEC)

    def _claim_trial(self) -> ClaimedTrial | None:
        """Claim host 0's next trial, if one is waiting."""
        try:
            self._queue.enqueue_missing()
            if self._queue.counts.waiting:
                return self._queue.claim()
        except preemption.Stopped as stopped:  # while the database was away
            self._signal = stopped.number
        return None

    def _put_back(self, trial: AssignedTrial) -> None:
        """Put back a trial that has not ended."""
        if trial.claimed:
            # A signal came while the database was away. This process ends, and its trial will count as dead.
            with contextlib.suppress(preemption.Stopped):
                self._queue.put_back(trial.claimed)

    # ---- training -----------------------------------------------------------------------------------

    def _train_one(self, trial: AssignedTrial) -> None:
        """Train a trial and end it in the queue.

        Raises:
          UserError: the trial failed, as the trials before it did.
        """
        reporter = TrialReporter(self._study, trial, self._queue, self._table)
        result = train_trial(self._study, trial.spec, train=self._train, cache=self._cache, reporter=reporter)
        if trial.claimed:
            self._end_in_queue(trial.claimed, result)
        score = result.summary.get("best_score")
        self._table.end(trial.spec.name, result.status, score, result.error)
        if result.error is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            raise UserError(f"{self._failures_in_a_row} trials in a row failed, the last one: {result.error}")

    def _end_in_queue(self, claimed: ClaimedTrial, result: TrialResult) -> None:
        if result.error is not None:
            self._queue.fail(claimed, result.error)
        elif result.status == "pruned":
            self._queue.prune(claimed, result.summary["best_score"])
        else:
            self._queue.complete(claimed, self._objective_of(result), diverged=result.status == "diverged")

    def _objective_of(self, result: TrialResult) -> float:
        """Return the value by which the study ranks a trial, the worst one if a target was not reached."""
        value = result.summary[self._study.objective]
        if value is not None:
            return value
        return -math.inf if self._study.maximizes else math.inf

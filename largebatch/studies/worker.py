"""What a process does for a study: it takes trials from the queue and trains them, until none is left."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Hashable
from functools import partial

import jax

from largebatch.errors import BadSetting, UserError
from largebatch.hosts import collectives, preemption
from largebatch.runs.folder import InUse, RunFolder, writing
from largebatch.runs.summary import summary_of_older_code
from largebatch.studies.database import open_storage
from largebatch.studies.display import SweepTable
from largebatch.studies.packing import Pack, PackedProgramCache, Packer
from largebatch.studies.queue import ClaimedTrial, TrialQueue, TrialSpec
from largebatch.studies.search import create_pruner
from largebatch.studies.study import Study, identity
from largebatch.studies.trial import AssignedTrial, TrialReporter, TrialResult, train_trial

log = logging.getLogger("largebatch")

MAX_FAILURES = 3  # in a row: then something is wrong that is not the trials'
POLL_SEC = 2.0


def open_queue(study: Study) -> TrialQueue:
    """Opens the study's trials in its database; once that is done, study.json is written too.

    Raises:
      UserError: the database cannot be opened, or holds another study of this name.
    """
    if study.storage.startswith(f"sqlite:///{study.path.resolve()}"):
        with writing(study.path):
            study.path.mkdir(parents=True, exist_ok=True)
    # The description is without the storage: another machine may reach the same database by another URL.
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
    """Trains trials until none is left. Host 0 has the queue; all hosts train the trials that it takes.

    Args:
      queue: host 0's; None on the others.
      train: `train.train_and_evaluate`.
      cache: the programs and data that trials share; handed on to `train`.
      packer: None trains one trial after the other, each on all devices. Else there is a trial on each device.
    """

    def __init__(
        self,
        study: Study,
        queue: TrialQueue | None,
        table: SweepTable,
        *,
        train: Callable,
        cache,
        packer: Packer | None = None,
    ):
        self._study, self._queue, self._table = study, queue, table
        self._train, self._cache, self._packer = train, cache, packer
        self._trials_at_once = packer.num_devices if packer else 1
        self._failures_in_a_row = 0
        self._signal = 0  # that this host got while it trained, or 0

    def run(self) -> None:
        """Trains all trials that this process gets.

        Raises:
          UserError: several trials in a row failed.
          preemption.Stopped: a signal came; the running trials are saved and put back.
        """
        while trials := self._next_trials():
            try:
                if self._packer:
                    self._train_packed(trials)
                else:
                    for trial in trials:
                        self._train_one(trial, self._cache)
            except InUse as busy:
                log.info("%s; it comes again later", busy)
                time.sleep(POLL_SEC)
            except preemption.Stopped as stopped:
                self._signal = stopped.number  # all hosts leave together, in `_next_trials`
            finally:
                self._put_back(trials)

    # ---- taking trials ------------------------------------------------------------------------------

    def _next_trials(self) -> list[AssignedTrial]:
        """The trials that host 0 claimed, on every host; none once all runs of the study have ended.

        While other processes run the last trials, this waits: if one of them dies, its trials come back.

        Raises:
          preemption.Stopped: on all hosts, if any of them got a signal.
        """
        said_so = False
        while True:
            claimed = self._claim_trials() if self._queue else []
            host_0 = collectives.json_from_primary(
                {
                    "specs": [dataclasses.asdict(trial.spec) for trial in claimed],
                    "left": self._queue.counts.left if self._queue else 0,
                    "signal": self._signal,
                }
            )
            signal = host_0["signal"] or preemption.agree()[0]
            if signal:
                for trial in claimed:
                    self._queue.put_back(trial)
                raise preemption.Stopped(signal)
            specs = [TrialSpec(**spec) for spec in host_0["specs"]]
            if specs and self._queue:
                return [AssignedTrial(spec, trial) for spec, trial in zip(specs, claimed, strict=True)]
            if specs:
                return [AssignedTrial(spec, claimed=None) for spec in specs]
            if not host_0["left"]:
                return []
            if not said_so:
                log.info("waiting for trials of other processes, or of a killed one")
                said_so = True
            time.sleep(POLL_SEC)

    def _claim_trials(self) -> list[ClaimedTrial]:
        """Host 0's next trials, as many as are trained at once."""
        claimed: list[ClaimedTrial] = []
        try:
            self._queue.enqueue_missing()
            if self._queue.counts.waiting:
                while len(claimed) < self._trials_at_once and (trial := self._queue.claim()):
                    claimed.append(trial)
        except preemption.Stopped as stopped:  # while the database was away
            self._signal = stopped.number
        return claimed

    def _put_back(self, trials: list[AssignedTrial]) -> None:
        """Puts back what has not ended."""
        for trial in trials:
            if trial.claimed:
                # A signal came while the database was away. This process ends, and its trials will be missed.
                with contextlib.suppress(preemption.Stopped):
                    self._queue.put_back(trial.claimed)

    # ---- training them ------------------------------------------------------------------------------

    def _train_packed(self, trials: list[AssignedTrial]) -> None:
        """Trains the trials whose programs are the same at once, group by group."""
        groups: dict[Hashable, list[AssignedTrial]] = {}
        for trial in trials:
            try:
                config = self._study.config_of(trial.spec.values, trial.spec.seed)
                group = self._packer.group_of(config)
            except BadSetting:
                self._train_one(trial, self._cache)  # which says why it fails
            else:
                groups.setdefault(group, []).append(trial)
        for group in groups.values():
            self._train_group(group)

    def _train_group(self, trials: list[AssignedTrial]) -> None:
        """Trains trials of one group at once; raises the first error that is not a trial's own."""
        first = trials[0].spec
        try:
            programs = self._packer.programs(self._study.config_of(first.values, first.seed))
        except jax.errors.JaxRuntimeError:
            for trial in trials:
                self._train_one(trial, self._cache)  # which says why it fails
            return
        pack = Pack(programs, len(trials))
        caches = [PackedProgramCache(self._cache, pack, run) for run in range(len(trials))]
        runs = [partial(self._train_one, trial, cache) for trial, cache in zip(trials, caches, strict=True)]
        for error in pack.run(runs):
            if error:
                raise error

    def _train_one(self, trial: AssignedTrial, cache) -> None:
        """Trains a trial and ends it in the queue.

        Raises:
          UserError: it failed, as the trials before it did.
        """
        reporter = TrialReporter(self._study, trial, self._queue, self._table)
        result = train_trial(self._study, trial.spec, train=self._train, cache=cache, reporter=reporter)
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
            self._queue.prune(claimed, summary_of_older_code(result.summary)["best_score"])
        else:
            self._queue.complete(claimed, self._objective_of(result), diverged=result.status == "diverged")

    def _objective_of(self, result: TrialResult) -> float:
        """The value by which the study ranks a trial; the worst one where a target was not reached."""
        value = result.summary[self._study.objective]
        if value is not None:
            return value
        return -math.inf if self._study.maximizes else math.inf

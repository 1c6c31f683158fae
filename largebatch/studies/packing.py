"""Several runs at once, one per device: each in a thread of its own, meeting wherever they need the devices.

A run does all it does alone: its own folder, checkpoints, clock. Only its two compiled programs are not its
own. A call of either waits for the other runs, and is done for all of them by one pmapped program, in which
nothing crosses devices.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from largebatch.hosts import replicas

PREDICTIONS = ("predict", "predict_views")  # the programs of a run that predict


class Pack:
    """Where runs meet.

    Args:
      inner_loop: made with `packed=True`, over all devices of this host.
      predictions: programs that take (variables, images), by name; made likewise.
      train, val_images: what is on the devices.
      state, plan: one replica's state and any plan, for the devices without a run.
      num_runs: how many runs take part, at most as many as devices.
    """

    def __init__(self, inner_loop, predictions: dict, train, val_images, state, plan, num_runs: int):
        self._inner_loop, self._predictions = inner_loop, predictions
        self._train, self._val_images = train, val_images
        # What fills the places of devices without a run, and of runs that have ended.
        self._states = replicas.shards_of(replicas.replicate(state))
        self._plan, self._here = plan, set(range(num_runs))
        self._asked: dict[int, tuple[str, tuple]] = {}
        self._answers: dict[int, Any] = {}
        self._meeting = threading.Condition()

    def inner_loop_of(self, run: int) -> Callable:
        """The `inner_loop` of run number `run`, which is on device number `run`."""
        return lambda state, data, plan, updates: self._ask(run, "inner_loop", (state, plan, updates))

    def prediction_of(self, run: int, name: str) -> Callable | None:
        """The prediction called `name` of run number `run`; None where there is none."""
        if self._predictions[name] is None:
            return None
        return lambda variables, images: self._ask(run, name, (variables,))

    def run(self, runs: list[Callable[[], Any]]) -> list:
        """Does the runs, each in a thread; returns what they return, or the exception that one raises."""
        results: list = [None] * len(runs)

        def do(number: int) -> None:
            try:
                results[number] = runs[number]()
            except Exception as error:
                results[number] = error
            finally:
                self._leave(number)

        threads = [threading.Thread(target=do, args=(number,)) for number in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _leave(self, run: int) -> None:
        """The run has ended: the others no longer wait for it."""
        with self._meeting:
            self._here.discard(run)
            self._answer_if_all_asked()

    def _ask(self, run: int, kind: str, arguments: tuple):
        with self._meeting:
            self._asked[run] = kind, arguments
            self._answer_if_all_asked()
            self._meeting.wait_for(lambda: run in self._answers)
            answer = self._answers.pop(run)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer_if_all_asked(self) -> None:
        """The last to ask does the work of all; those who train first, so that they meet again."""
        if not self._here or self._asked.keys() != self._here:
            return
        asked, self._asked = self._asked, {}
        answers = {name: partial(self._run_predictions, name) for name in self._predictions}
        for kind, answer_all in ({"inner_loop": self._run_inner_loops} | answers).items():
            calls = {run: arguments for run, (one, arguments) in asked.items() if one == kind}
            if calls:
                try:
                    self._answers |= answer_all(calls)
                except Exception as error:  # each run meets it in its own thread
                    self._answers |= dict.fromkeys(calls, error)
        self._meeting.notify_all()

    def _run_inner_loops(self, calls: dict) -> dict:
        places = range(len(self._states))
        states = [calls[run][0] if run in calls else self._states[run] for run in places]
        plans = [calls[run][1] if run in calls else self._plan for run in places]
        updates = np.array([calls[run][2] if run in calls else 0 for run in places], np.int32)
        plan = jax.tree.map(lambda *rows: np.stack(rows), *plans)
        state, values = self._inner_loop(replicas.stack(states), self._train, plan, updates)
        values = {name: np.asarray(rows) for name, rows in values.items()}
        states = replicas.shards_of(state)
        for run in places:
            if run not in calls:
                self._states[run] = states[run]  # its old one was donated
        return {run: (states[run], {name: rows[run] for name, rows in values.items()}) for run in calls}

    def _run_predictions(self, name: str, calls: dict) -> dict:
        places = range(len(self._states))
        variables = [calls[run][0] if run in calls else self._states[run].variables for run in places]
        logits = np.asarray(self._predictions[name](replicas.stack(variables), self._val_images))
        return {run: logits[run][None] for run in calls}


class Slot:
    """One device of a pack, as a run sees it: takes the place of `programs.Shared`."""

    def __init__(self, shared, pack: Pack, run: int):
        self._shared, self._pack, self._run = shared, pack, run
        self.local_devices = [shared.local_devices[run]]

    def data(self, config):
        """The cache, and what of the data is on this device."""
        cache, placed = self._shared.data(config)
        train, val_images = (replicas.shards_of(tree)[self._run] for tree in (placed.train, placed.val_images))
        return cache, placed._replace(train=train, val_images=val_images)

    def programs(self, config):
        """The programs that all runs of the pack call together."""
        shared = self._shared.programs(config)
        own = {name: self._pack.prediction_of(self._run, name) for name in PREDICTIONS}
        return shared._replace(inner_loop=self._pack.inner_loop_of(self._run), **own)

    def whitening_kernel(self, config):
        """The kernel of the network's frozen stem, if it has one."""
        return self._shared.whitening_kernel(config)

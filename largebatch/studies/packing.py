"""Several runs at once, one per device: each in a thread of its own, meeting wherever they need the devices.

A run does all it does alone: its own folder, checkpoints, clock. Only its compiled programs are shared. A call of
one waits for the other runs, and one pmapped program then does it for all of them. Nothing in it crosses devices.
"""

import dataclasses
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from largebatch.data.streaming import Resident
from largebatch.hosts import replicas

PREDICTIONS = ("predict", "predict_views")  # the programs of a run that predict
INNER_LOOP = "inner_loop"


@dataclass(frozen=True)
class PackedPrograms:
    """The programs that the runs of a pack have in common, and the data on the devices.

    Attributes:
      inner_loop: made with `packed=True`, over all devices of this host.
      predictions: programs that take (variables, block), by their names in PREDICTIONS; made likewise, or None.
      train: the training set; every device has all of it.
      validation: the one block of the validation split, likewise; see `validation.Block`.
      idle_state, idle_inputs: one replica's state and the inputs of a call, for devices without a run.
    """

    inner_loop: Callable
    predictions: dict[str, Callable | None]
    train: Any
    validation: Any
    idle_state: Any
    idle_inputs: Any


class Packer(Protocol):
    """What packing needs of the root's programs. A script hands it in, as the library does not import the root."""

    num_devices: int

    def group_of(self, config) -> Hashable:
        """Runs of equal group have the same programs and can be packed together.

        Raises:
          BadSetting: the run cannot be packed.
        """

    def programs(self, config) -> PackedPrograms:
        """What runs of the group of `config` share."""


@dataclass(frozen=True)
class _Call:
    """A run's call of a program, which waits for the other runs."""

    program: str
    arguments: tuple


class Pack:
    """Where runs meet: run number k is on device number k.

    A run is present until it ends. When all present runs have called a program, the last of them does all calls.

    Args:
      num_runs: how many runs take part, at most as many as devices.
    """

    def __init__(self, programs: PackedPrograms, num_runs: int):
        self._programs = programs
        # States for the devices whose run has ended, or that never had one.
        self._idle_states = replicas.shards_of(replicas.replicate(programs.idle_state))
        self._present = set(range(num_runs))
        self._calls: dict[int, _Call] = {}
        self._answers: dict[int, Any] = {}  # of run: what its program returned, or the exception it raised
        self._meeting = threading.Condition()

    def run(self, runs: list[Callable[[], None]]) -> list[Exception | None]:
        """Does the runs, each in a thread; returns the exception that each one raised, or None."""
        errors: list[Exception | None] = [None] * len(runs)

        def do(run: int) -> None:
            try:
                runs[run]()
            except Exception as error:
                errors[run] = error
            finally:
                self._leave(run)

        threads = [threading.Thread(target=do, args=(run,)) for run in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def inner_loop(self, run: int, state, train, inputs, updates):
        """The inner loop of one run, as `CompiledPrograms.inner_loop`; the data are the pack's own."""
        return self._call(run, INNER_LOOP, (state, inputs, updates))

    def predict(self, run: int, name: str, variables, block):
        """A prediction of one run; the images are the pack's own."""
        return self._call(run, name, (variables,))

    def _call(self, run: int, program: str, arguments: tuple):
        """Waits until all present runs have called; returns this run's part."""
        with self._meeting:
            self._calls[run] = _Call(program, arguments)
            self._answer_if_all_called()
            self._meeting.wait_for(lambda: run in self._answers)
            answer = self._answers.pop(run)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _leave(self, run: int) -> None:
        """The run has ended: the others no longer wait for it."""
        with self._meeting:
            self._present.discard(run)
            self._answer_if_all_called()

    def _answer_if_all_called(self) -> None:
        """Does the calls of all runs, if all have called. Those that train come first, so that they meet again."""
        if not self._present or self._calls.keys() != self._present:
            return
        calls, self._calls = self._calls, {}
        for program in (INNER_LOOP, *PREDICTIONS):
            arguments = {run: call.arguments for run, call in calls.items() if call.program == program}
            if not arguments:
                continue
            try:
                if program == INNER_LOOP:
                    answers = self._run_inner_loops(arguments)
                else:
                    answers = self._run_predictions(program, arguments)
            except Exception as error:  # each run raises it in its own thread
                answers = dict.fromkeys(arguments, error)
            self._answers.update(answers)
        self._meeting.notify_all()

    def _run_inner_loops(self, arguments: dict[int, tuple]) -> dict[int, tuple]:
        """The inner loops of the runs in `arguments`; devices without one of them do no updates."""
        states, inputs, updates = [], [], []
        for device, idle_state in enumerate(self._idle_states):
            if device in arguments:
                device_state, device_inputs, device_updates = arguments[device]
            else:
                device_state, device_inputs, device_updates = idle_state, self._programs.idle_inputs, 0
            states.append(device_state)
            inputs.append(device_inputs)
            updates.append(device_updates)
        stacked_inputs = jax.tree.map(lambda *rows: np.stack(rows), *inputs)
        state, values = self._programs.inner_loop(
            replicas.stack(states), self._programs.train, stacked_inputs, np.array(updates, np.int32)
        )
        values = {name: np.asarray(rows) for name, rows in values.items()}  # [devices, ...]
        states = replicas.shards_of(state)
        for device in range(len(states)):
            if device not in arguments:
                self._idle_states[device] = states[device]  # its old one was donated
        return {run: (states[run], {name: rows[run] for name, rows in values.items()}) for run in arguments}

    def _run_predictions(self, program: str, arguments: dict[int, tuple]) -> dict[int, tuple]:
        """The sums of the runs in `arguments`, and their logits, each with a leading device axis of 1."""
        variables = []
        for device, idle_state in enumerate(self._idle_states):
            if device in arguments:
                (device_variables,) = arguments[device]
            else:
                device_variables = idle_state.variables
            variables.append(device_variables)
        predict = self._programs.predictions[program]
        sums, logits = predict(replicas.stack(variables), self._programs.validation)
        sums = jax.tree.map(np.asarray, sums)  # [devices, ...]
        logits = replicas.shards_of(logits)
        return {run: (jax.tree.map(lambda rows, run=run: rows[run], sums), logits[run]) for run in arguments}


class PackedProgramCache:
    """One device of a pack, as its run sees it: used in place of `cache`, which all runs share."""

    def __init__(self, cache, pack: Pack, run: int):
        self._cache, self._pack, self._run = cache, pack, run
        self.local_devices = [cache.local_devices[run]]

    def load(self, config):
        """The Setup of `config`, and what of the data is on this device."""
        placed = self._cache.load(config)
        data = dataclasses.replace(
            placed.data,
            train=Resident(replicas.shards_of(placed.data.train.arrays)[self._run]),
            validation=placed.data.validation.of_local_device(self._run),
        )
        return dataclasses.replace(placed, data=data)

    def compiled(self, setup):
        """The programs of a Setup; those that need the devices wait for the other runs of the pack."""
        programs = self._cache.compiled(setup)
        packed = {INNER_LOOP: partial(self._pack.inner_loop, self._run)}
        for name in PREDICTIONS:
            if getattr(programs, name) is not None:
                packed[name] = partial(self._pack.predict, self._run, name)
        return dataclasses.replace(programs, **packed)

    def whitening_kernel(self, setup):
        """The kernel of the network's frozen stem, if it has one."""
        return self._cache.whitening_kernel(setup)

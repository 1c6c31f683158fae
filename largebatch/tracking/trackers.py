"""Tools that show a run, as TensorBoard: what they are told, and that none of them can stop it.

To add one, write a class with the methods of `Tracker`, a line in TRACKERS and a field in a config's `log`.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from largebatch.errors import UserError
from largebatch.tracking.tensorboard import TensorBoard
from largebatch.tracking.tracked_run import TrackedRun
from largebatch.tracking.weights_and_biases import WeightsAndBiases, wandb_is_installed

log = logging.getLogger("largebatch")

GOES_ON = "the run goes on without it"


class Tracker(Protocol):
    """Hears of a run on host 0, in plain JSON. If it raises anything, it hears no more; the run goes on."""

    def row(self, row: dict) -> None:
        """Takes a line of metrics.jsonl."""

    def went_back(self) -> None:
        """The run went back to a checkpoint: rows of later steps come once more."""

    def end(self, summary: dict) -> None:
        """Takes summary.json, when this process has done its part of the run; the last call."""


# By the field of a config's `log` that asks for it.
TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_installed(options: dict) -> None:
    """Refuses what cannot be, before a run begins.

    Args:
      options: a config's `log`.
    Raises:
      UserError: a package is missing.
    """
    if options.get("wandb") and not wandb_is_installed():
        raise UserError("log.wandb: wandb is not installed; allowed: after pip install -r requirements-cloud.txt")


class Trackers:
    """Those that a run's config asks for. One that fails is named in a line and then left out."""

    def __init__(self, run: TrackedRun):
        self._trackers: dict[str, Tracker] = {}
        for name, make in TRACKERS.items():
            if run.config["log"].get(name):
                try:
                    self._trackers[name] = make(run)
                except Exception as error:
                    _say_why(name, error)

    def row(self, row: dict) -> None:
        """See `Tracker.row`."""
        self._tell(lambda tracker: tracker.row(row))

    def went_back(self) -> None:
        """See `Tracker.went_back`."""
        self._tell(lambda tracker: tracker.went_back())

    def end(self, summary: dict) -> None:
        """See `Tracker.end`."""
        self._tell(lambda tracker: tracker.end(summary), then="the run itself is whole")

    def _tell(self, tell: Callable[[Tracker], None], then: str = GOES_ON) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self._trackers[name]
                _say_why(name, error, then)


def _say_why(name: str, error: Exception, then: str = GOES_ON) -> None:
    reason = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    log.warning("log.%s: %s; %s", name, reason, then)

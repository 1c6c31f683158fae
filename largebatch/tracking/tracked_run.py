"""What a tracker is told of a run before its first row."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run that begins or goes on.

    Attributes:
      folder: of the run; a tracker may write to a folder of its own name in it.
      name: of the run.
      group: the study that it is a trial of, or None.
      config: as plain JSON.
    """

    folder: Path
    name: str
    group: str | None
    config: dict

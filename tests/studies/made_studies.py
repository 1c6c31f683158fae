"""Small studies for tests, defined as sweep.py defines them."""

from pathlib import Path

import model as models
import train
from build import ProgramCache
from largebatch.config import rules
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.studies.display import SweepDisplay
from largebatch.studies.queue import TrialQueue
from largebatch.studies.space import Space
from largebatch.studies.study import Study, StudyOptions, define_study
from largebatch.studies.worker import Worker

RULES = rules.rules(models.MODELS)


def space_of(choices: dict, **functions) -> Space:
    """A space in which every combination of these choices is a setting."""

    def suggest(trial):
        for field, values in choices.items():
            trial.suggest_categorical(field, values)

    return Space(suggest, RULES, **functions)


def make_study(config, path: Path, space: Space, **options) -> Study:
    study = define_study(path, config, StudyOptions(**options), space, models.MODELS)
    RunFolder(path).write_json("study.json", study.description)
    return study


def train_study(study: Study, cache=None, *, enabled: bool = False) -> list[reader.Run]:
    """Train all trials in this process; return their runs, in the order of settings and seeds."""
    queue = TrialQueue(study)
    display = SweepDisplay("s", study.kind, lambda: queue.counts, enabled=enabled)
    with display:
        Worker(study, queue, display, train=train.train_and_evaluate, cache=cache or ProgramCache()).run()
    assert queue.fill().left == 0
    return reader.read_study(study.path).runs

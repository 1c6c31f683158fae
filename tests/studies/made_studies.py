"""Small studies for tests, defined as sweep.py defines them."""

import contextlib
from pathlib import Path

import sqlalchemy

import model as models
import train
from build import ProgramCache
from largebatch.config import rules
from largebatch.runs import reader
from largebatch.runs.folder import RunFolder
from largebatch.studies.queue import TrialQueue
from largebatch.studies.space import Space
from largebatch.studies.study import Study, StudyOptions, define_study
from largebatch.studies.worker import Worker

RULES = rules.rules(models.MODELS)


@contextlib.contextmanager
def databases_in_memory():
    """Databases that wait for no disk: most of the time of small studies would be that."""

    def forgo_the_disk(connection, _):
        if type(connection).__module__ == "sqlite3":
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA journal_mode = MEMORY")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", forgo_the_disk)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", forgo_the_disk)


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


def train_study(study: Study, cache=None, *, train=train.train_and_evaluate) -> list[reader.Run]:
    """Train all trials in this process; return their runs, in the order of settings and seeds."""
    queue = TrialQueue(study)
    Worker(study, queue, train=train, cache=cache or ProgramCache()).run()
    assert queue.fill().left == 0
    return reader.read_study(study.path).runs

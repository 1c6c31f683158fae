"""Definition of a study: a space, how it is searched, and the config that all its runs start from."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ml_collections import config_dict
from optuna.distributions import BaseDistribution

from largebatch.config import dicts, rules
from largebatch.config.rules import Models
from largebatch.data.batching import ORDER_VERSION
from largebatch.runs.reader import SCORES
from largebatch.studies.database import without_password
from largebatch.studies.space import Setting, Space, settings_of
from largebatch.tasks.kinds import CLASSIFICATION, KINDS, TaskKind
from largebatch.util import BadSetting, UserError

MAY_CHANGE = ("trials", "seeds", "best_seeds", "dtype_is_auto")  # fields of study.json that may, on resuming
# Without GROUPS in the space file --best_seeds applies to the best setting of each value of the first searched
# field of these.
BEST_BY = ("batch.size", "optimizer.name")
SPACE_FILE = "space.py"  # in the study folder: a copy of the file that --space named


@dataclass(frozen=True)
class StudyOptions:
    """Flags of sweep.py for a study, which study.json records.

    Attributes:
      trials: searched runs in total; None for the whole grid.
      seeds: runs of each setting, which differ by seed.
      best_seeds: runs of each best setting in all; 0 for no more than `seeds`.
      objective: one of OBJECTIVES, by which trials are ranked; None for the default of the config.
      storage: a database URL; None for an SQLite file in the study folder.
    """

    trials: int | None = None
    seeds: int = 1
    best_seeds: int = 0
    sampler: str = "grid"
    pruner: str = "none"
    objective: str | None = None
    study_seed: int = 0
    storage: str | None = None
    heartbeat_sec: int = 20

    def check(self, space: Space, config: config_dict.ConfigDict) -> None:
        """Refuse options that do not fit each other, the space or the config.

        Raises:
          UserError: names the option.
        """
        if self.sampler == "grid":
            if space.refine and self.trials is not None:
                raise UserError(f"--trials: {self.trials}; allowed with a space that has refine(): none")
        elif self.trials is None:
            raise UserError(f"--trials: missing; allowed without it: --sampler grid, not {self.sampler}")
        elif space.refine:
            raise UserError(f"--sampler: {self.sampler}; allowed with a space that has refine(): grid")
        if self.trials is not None and self.trials % self.seeds:
            raise UserError(f"--trials: {self.trials}; allowed: a multiple of --seeds, {self.seeds}")
        if 0 < self.best_seeds <= self.seeds:
            raise UserError(f"--best_seeds: {self.best_seeds}; allowed: more than --seeds, {self.seeds}")
        if self.objective == "best_val_accuracy" and config.task.name != CLASSIFICATION.name:
            raise UserError(
                f"--objective: best_val_accuracy; allowed with task.name {config.task.name!r}: best_score"
            )
        if self.objective in SCORES:
            return
        if not _has_target(config):
            raise UserError(
                f"--objective: {self.objective} needs train.target_accuracy or train.target_score; both are None"
            )
        allowed = ("none", "median") if space.groups else ("none",)  # others would rank by the objective
        if self.pruner not in allowed:
            raise UserError(
                f"--pruner: {self.pruner}; allowed with --objective {self.objective}: {' | '.join(allowed)}"
            )


@dataclass(frozen=True)
class Study:
    """Study of a study folder.

    Attributes:
      path: the study folder.
      config: config that all runs start from; its dtype is not "auto", so that all machines use the same.
      options: its options, with an objective.
      settings: settings that are known in advance, in the order of their index; empty with TPE.
      distributions: distributions by which the database records the searched fields.
      models: see `config.rules`.
      description: the content of study.json.
    """

    path: Path
    config: config_dict.ConfigDict
    options: StudyOptions
    space: Space
    settings: list[Setting]
    distributions: dict[str, BaseDistribution]
    models: Models
    description: dict

    @property
    def kind(self) -> TaskKind:
        """Kind of the task that the study's trials train for."""
        return KINDS[self.config.task.name]

    @property
    def maximizes(self) -> bool:
        """True if a larger objective is better."""
        return self.options.objective in SCORES and self.kind.higher_is_better

    @property
    def storage(self) -> str:
        """URL of the database."""
        return self.options.storage or f"sqlite:///{(self.path / 'study.db').resolve()}"

    @property
    def num_searched(self) -> int:
        """Number of settings that are searched, before those around the best ones."""
        return len(self.settings) or self.options.trials // self.options.seeds

    def group_of(self, setting: Setting) -> str:
        """Return the values of the fields by which best settings are chosen."""
        fields = self.space.groups or tuple(field for field in BEST_BY if field in setting)[:1]
        return json.dumps([setting.get(field) for field in fields])

    def config_of(self, setting: Setting, seed: int) -> config_dict.ConfigDict:
        """Create the config of one run.

        Raises:
          BadSetting: the config is not allowed.
        """
        config = self.config.copy_and_resolve_references()
        try:
            with config.ignore_type():  # an integer where the base has "full"
                for field, value in setting.items():
                    section, _, name = field.rpartition(".")
                    value = tuple(value) if isinstance(value, list) else value  # a database returns lists
                    (config[section] if section else config)[name] = value
                config.seed = self.config.seed + seed
                if self.space.derive:
                    self.space.derive(config)
            rules.check(config.to_dict(), self.models)
            if config.model.dtype == "auto":  # each machine would choose its own
                raise UserError("model.dtype: 'auto'; allowed in a trial: float32 | bfloat16")
        except Exception as error:  # `derive` is a user's function
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise BadSetting(f"--space: {setting}: {kind}{' '.join(str(error).split())}") from error
        return config

    def folder_of(self, setting: Setting, seed: int) -> Path:
        """Return the run folder of a trial, named by its setting, as in sgd-0.1-512-1f3a9c02-0."""
        content = json.dumps(setting, sort_keys=True)
        words = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in setting.values())
        words = re.sub(r"[^A-Za-z0-9._+-]+", "", words)[:60]
        return self.path / "trials" / f"{words}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-{seed}"


def _has_target(config: config_dict.ConfigDict) -> bool:
    return (config.train.target_accuracy, config.train.target_score) != (None, None)


def define_study(
    path: Path,
    config: config_dict.ConfigDict,
    options: StudyOptions,
    space: Space,
    models: Models,
    **description: object,
) -> Study:
    """Define the study in folder `path`.

    Args:
      config: base config, whose dtype is not "auto".
      models: see `config.rules`.
      description: further fields of study.json.
    Raises:
      UserError: an option, the space or a setting of it is not allowed.
    """
    best = "best_val_accuracy" if config.task.name == CLASSIFICATION.name else "best_score"
    objective = options.objective or ("steps_to_target" if _has_target(config) else best)
    options = dataclasses.replace(options, objective=objective)
    options.check(space, config)
    count = None if options.trials is None else options.trials // options.seeds
    settings, distributions = settings_of(space, options.sampler, options.study_seed, count)
    shown = dataclasses.asdict(options) | {
        "storage": options.storage and without_password(options.storage),
        "config": config.to_dict(),
        "order_version": ORDER_VERSION,
        "groups": space.groups,
        **description,
        "fields": list(distributions),
    }
    study = Study(path, config, options, space, settings, distributions, models, json.loads(json.dumps(shown)))
    for setting in settings:
        for each in (setting, *space.refined(setting)):
            study.config_of(each, seed=0)  # raises if it is not allowed
    return study


def refuse_another(path: Path, description: dict, recorded: dict) -> None:
    """Check that a study folder's study.json is of the study `description`.

    Raises:
      UserError: the two differ in more than MAY_CHANGE.
    """
    if changed := dicts.difference(identity(description), identity(recorded), ("here", "there")):
        raise UserError(f"--study: {path} holds another study: {changed}")


def identity(description: dict) -> dict:
    """Return the part of a study.json that may not change."""
    kept = {name: value for name, value in description.items() if name not in MAY_CHANGE}
    return kept | {"config": dicts.identity(description["config"])}

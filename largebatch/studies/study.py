"""Definition of a study: a space, its search options, and the config that all its runs start from."""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ml_collections import config_dict

from largebatch.config import dicts, rules
from largebatch.config.rules import Models
from largebatch.data.batching import ORDER_VERSION
from largebatch.runs.reader import SCORES, lies_in
from largebatch.studies import branching
from largebatch.studies.branching import BranchOptions
from largebatch.studies.database import without_password
from largebatch.studies.queue import TrialSpec
from largebatch.studies.search import SearchOptions, fixed_settings, grid, refined
from largebatch.studies.space import SpaceFile, as_json, read_space
from largebatch.tasks.kinds import CLASSIFICATION, KINDS, TaskKind
from largebatch.util import BadSetting, UserError

log = logging.getLogger("largebatch")

ROOT = Path(__file__).resolve().parents[2]  # root of this project

# Required options of a study of branches: with others some branches would have no loss to compare.
BRANCH_OPTIONS = {"sampler": "grid", "pruner": "none", "best_seeds": 0, "trials": None}
# Fields of study.json that may change when a study is resumed.
MAY_CHANGE = ("trials", "seeds", "best_seeds", "space_file", "space_sha256", "dtype_is_auto")
# Without GROUPS in the space file --best_seeds applies to the best setting of each value of the first searched
# field of these.
BEST_BY = ("batch.size", "optimizer.name")


@dataclass(frozen=True)
class StudyOptions:
    """Flags of sweep.py for a study, which study.json records.

    Attributes:
      space: the space file; None for branches of a run.
      trials: searched runs in total; None for the whole grid.
      objective: one of OBJECTIVES, by which trials are ranked; None for the default of the config.
      storage: a database URL; None for an SQLite file in the study folder.
    """

    space: str | None
    trials: int | None
    seeds: int
    best_seeds: int
    sampler: str
    pruner: str
    objective: str | None
    study_seed: int
    storage: str | None
    heartbeat_sec: int
    branch: str | None = None
    branch_images: int | None = None
    branch_sizes: list[int] | None = None
    branch_steps: list[int] | None = None

    @property
    def branches(self) -> BranchOptions | None:
        """Options of branches; None if this is not a study of branches."""
        if not self.branch:
            return None
        return BranchOptions(self.branch, self.branch_images, self.branch_sizes, self.branch_steps)

    def with_objective(self, config: config_dict.ConfigDict) -> "StudyOptions":
        """Return these options, with the default objective of `config` if none was given."""
        if self.objective:
            return self
        best = "best_val_accuracy" if KINDS[config.task.name] == CLASSIFICATION else "best_score"
        default = "steps_to_target" if _has_target(config) else best
        return dataclasses.replace(self, objective=default)


@dataclass(frozen=True)
class Study:
    """Study of a study folder, resolved from its study.json, with the functions of its space file.

    Attributes:
      path: the study folder.
      config: config that all runs start from; its dtype is not "auto", so that all machines use the same.
      storage: URL of the database.
      derive: function that sets the config fields that depend on the searched ones.
      models: see `config.rules`.
      description: the content of study.json.
      groups: see `SpaceFile`.
    """

    path: Path
    config: config_dict.ConfigDict
    storage: str
    search: SearchOptions
    pruner: str
    objective: str
    heartbeat_sec: int
    derive: Callable[[config_dict.ConfigDict], None]
    models: Models
    description: dict
    groups: tuple[str, ...] = ()

    @property
    def kind(self) -> TaskKind:
        """Kind of the task that the study's trials train for."""
        return KINDS[self.config.task.name]

    @property
    def maximizes(self) -> bool:
        """True if a larger objective is better."""
        return self.objective in SCORES and self.kind.higher_is_better

    def config_of(self, values: dict, seed: int) -> config_dict.ConfigDict:
        """Create the config of one run.

        Raises:
          BadSetting: the config is not allowed.
        """
        config = self.config.copy_and_resolve_references()
        try:
            with config.ignore_type():  # an integer where the base has "full"
                for field, value in values.items():
                    _set_field(config, field, value)
                config.seed = self.config.seed + seed
                self.derive(config)
            rules.check(config.to_dict(), self.models)
            if config.model.dtype == "auto":  # each machine would choose its own
                raise UserError("model.dtype: 'auto'; allowed in a trial: float32 | bfloat16")
        except Exception as error:  # `derive` is a user's function
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise BadSetting(f"--space: {values}: {kind}{' '.join(str(error).split())}") from error
        return config

    def folder_of(self, spec: TrialSpec) -> Path:
        """Return the run folder of a trial."""
        return self.path / "trials" / spec.name


def _has_target(config: config_dict.ConfigDict) -> bool:
    return (config.train.target_accuracy, config.train.target_score) != (None, None)


def _set_field(config: config_dict.ConfigDict, field: str, value: object) -> None:
    group, _, name = field.rpartition(".")
    target = config[group] if group else config
    target[name] = tuple(value) if isinstance(value, list) else value  # a database returns tuples as lists


# ---- a study from the command line and a folder -----------------------------------------------------


def define_study(
    path: Path,
    config: config_dict.ConfigDict,
    options: StudyOptions,
    recorded: dict,
    *,
    space_given: bool,
    dtype_is_auto: bool,
    models: Models,
) -> Study:
    """Define the study in folder `path` by `config` and `options`.

    Args:
      config: base config, whose dtype is not "auto".
      recorded: the study.json that the folder already has, or {}.
      space_given: True if the user named the space file; else only `recorded` does.
      dtype_is_auto: True if the user's config has dtype "auto".
      models: see `config.rules`.
    Raises:
      UserError: an option, the space or a point of it is not allowed; or `recorded` is another study.
    """
    shown_storage = without_password(options.storage) if options.storage else options.storage
    options = options.with_objective(config)
    if options.branches:
        points = branching.recorded_points(recorded) or branching.chosen_points(options.branches)
        space_file = branching.branch_space(options.branches, points)
    else:
        space_file = read_space_file(path, Path(options.space), recorded, models, given=space_given)
    search = search_options(space_file, options, config)
    study = Study(
        path=path,
        config=config,
        storage=options.storage or f"sqlite:///{(path / 'study.db').resolve()}",
        search=search,
        pruner=options.pruner,
        objective=options.objective,
        heartbeat_sec=options.heartbeat_sec,
        derive=space_file.derive,
        models=models,
        description=_describe(options, space_file, search, config, shown_storage),
        groups=space_file.groups,
    )
    if dtype_is_auto:
        study.description["dtype_is_auto"] = True
    if options.branches:
        study.description["branch_points"] = [dataclasses.asdict(point) for point in points]
    for values in fixed_settings(search):
        for setting in (values, *refined(search, values)):
            study.config_of(setting, seed=0)  # raises if it is not allowed
    refuse_another(path, study.description, recorded)
    return study


def search_options(space_file: SpaceFile, options: StudyOptions, config: config_dict.ConfigDict) -> SearchOptions:
    """Create the search options of a space, which determine the runs of its study.

    Raises:
      UserError: options that do not fit each other or the space.
    """
    for name in ("includes", "refine"):
        if getattr(space_file, name) and options.sampler != "grid":
            raise UserError(f"--sampler: {options.sampler}; allowed with a space that has {name}(): grid")
    return SearchOptions(
        space=space_file.space,
        sampler=options.sampler,
        study_seed=options.study_seed,
        settings=number_of_settings(space_file, options, config),
        seeds=options.seeds,
        best_seeds=options.best_seeds,
        best_by=space_file.groups or tuple(field for field in BEST_BY if field in space_file.space)[:1],
        includes=space_file.includes,
        refine=space_file.refine,
    )


def _describe(
    options: StudyOptions,
    space_file: SpaceFile,
    search: SearchOptions,
    config: config_dict.ConfigDict,
    shown_storage: str | None,
) -> dict:
    """Return the content of study.json, as it will be read back."""
    description = dataclasses.asdict(options)
    description["space"] = as_json(space_file.space)
    description["storage"] = shown_storage
    description["space_file"] = options.space
    description["space_sha256"] = space_file.sha256
    description["config"] = config.to_dict()
    description["order_version"] = ORDER_VERSION
    if not options.branch:  # the format of studies without branches
        description = {name: value for name, value in description.items() if not name.startswith("branch")}
    if space_file.includes:
        description["grid"] = grid(space_file.space, space_file.includes)
    if space_file.groups:
        description["groups"] = list(space_file.groups)
    if space_file.refine:
        description["refined"] = [refined(search, values) for values in fixed_settings(search)]
    return json.loads(json.dumps(description))


def adopt_recorded_config(config: config_dict.ConfigDict, recorded: dict, file: Path) -> None:
    """Set `config` to the one that a file of a study or run recorded; warn of paths that it names elsewhere.

    Raises:
      UserError: the file holds no config.
    """
    platform = recorded.get("devices", {}).get("platform") if isinstance(recorded, dict) else None
    if not isinstance(platform, str):
        raise UserError(f"{file} holds no config of a run or study")
    before = dicts.flatten(config.to_dict())
    recorded = dict(recorded)
    # The coordinator is set by the user each time: no folder makes this process connect to an address.
    recorded["devices"] = {"platform": platform}
    with config.unlocked():
        config.update(config_dict.ConfigDict(recorded))
    after = dicts.flatten(config.to_dict())
    for field in dicts.PATHS:
        value = after[field]
        if isinstance(value, str) and value != before[field] and not lies_in(value, file.parent):
            log.warning("uses %s %s, which %s names", field, value, file.parent)


def read_space_file(path: Path, file: Path, recorded: dict, models: Models, *, given: bool) -> SpaceFile:
    """Run the space file of the study in folder `path`.

    A space file is a program, and the study folder may come from someone else. So a file that only the study.json
    `recorded` names is run only if it is the user's own and has not changed since the study began.

    Raises:
      UserError: the file may not be run, or an error of `read_space`.
    """
    if given:
        return read_space(file, rules.rules(models))
    if not any(lies_in(file, folder) for folder in (ROOT, Path.cwd())):
        reason = "lies outside this project and the current folder"
    elif lies_in(file, path):
        reason = "lies in that folder itself"
    elif not isinstance(recorded.get("space_sha256"), str):
        reason = "was recorded without a SHA-256"
    else:
        log.warning("runs the space file %s, which %s names", file, path)
        return read_space(file, rules.rules(models), recorded["space_sha256"])
    raise UserError(f"--study: {path} names the space file {file}, which {reason}; give --space FILE to run it")


def number_of_settings(space_file: SpaceFile, options: StudyOptions, config: config_dict.ConfigDict) -> int:
    """Return the number of settings for --trials runs.

    Raises:
      UserError: options that do not fit each other.
    """
    if options.branches:
        for name, allowed in BRANCH_OPTIONS.items():
            if getattr(options, name) != allowed:
                raise UserError(f"--{name}: {getattr(options, name)}; allowed with --branch: {allowed}")
    trials, seeds = options.trials, options.seeds
    grid_size = len(grid(space_file.space, space_file.includes)) if options.sampler == "grid" else None
    if trials is None and grid_size is None:
        raise UserError(f"--trials: missing; allowed without it: --sampler grid, not {options.sampler}")
    if trials is None:
        settings = grid_size
    elif trials % seeds:
        raise UserError(f"--trials: {trials}; allowed: a multiple of --seeds, {seeds}")
    else:
        settings = trials // seeds
    if space_file.refine and settings != grid_size:
        raise UserError(f"--trials: {trials}; allowed with a space that has refine(): all {grid_size * seeds}")
    if grid_size is not None and settings > grid_size:
        raise UserError(f"--trials: {trials}; allowed: up to {grid_size * seeds}, the grid x --seeds")
    if 0 < options.best_seeds <= seeds:
        raise UserError(f"--best_seeds: {options.best_seeds}; allowed: more than --seeds, {seeds}")
    if options.objective == "best_val_accuracy" and config.task.name != CLASSIFICATION.name:
        raise UserError(f"--objective: best_val_accuracy; allowed with task.name {config.task.name!r}: best_score")
    if options.objective not in SCORES:
        if not _has_target(config):
            raise UserError(
                f"--objective: {options.objective} needs train.target_accuracy or train.target_score; both are None"
            )
        allowed = ("none", "median") if space_file.groups else ("none",)  # others would rank by the objective
        if options.pruner not in allowed:
            raise UserError(
                f"--pruner: {options.pruner}; allowed with --objective {options.objective}: {' | '.join(allowed)}"
            )
    return settings


def refuse_another(path: Path, description: dict, recorded: dict) -> None:
    """Check that a study folder's study.json `recorded`, if there is one, is of the study `description`.

    Raises:
      UserError: the two differ in more than MAY_CHANGE: in space, sampler, objective, pruner, config, ...
    """
    if not recorded:
        return
    changed = dicts.difference(identity(description), identity(recorded), ("here", "there"))
    if changed:
        raise UserError(f"--study: {path} holds another study: {changed}")


def identity(description: dict) -> dict:
    """Return the part of a study.json that may not change."""
    kept = {"order_version": 1}  # of studies before it was recorded
    for name, value in description.items():
        # With other seeds another setting may be the best, and the settings around it already have numbers.
        if name not in MAY_CHANGE or (name == "seeds" and "refined" in description):
            kept[name] = value
    kept["config"] = dicts.identity(description["config"])
    return kept

"""What a study is: a space, how it is searched, and the config that all its runs start from."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy
from ml_collections import config_dict

from largebatch.config import fields
from largebatch.config.rules import Networks, nearest_field, rules
from largebatch.config.validate import validate
from largebatch.data import batching
from largebatch.errors import BadSetting, UserError
from largebatch.runs import reader
from largebatch.studies import search

log = logging.getLogger("largebatch")

ROOT = Path(__file__).resolve().parents[2]  # of this project

OBJECTIVES = {
    "best_val_accuracy": "maximize",
    "steps_to_target": "minimize",
    "examples_to_target": "minimize",
    "sec_to_target": "minimize",
}
MAY_CHANGE = ("trials", "seeds", "best_seeds", "space_file", "space_sha256")
BEST_BY = ("batch.size", "optimizer.name")  # --best_seeds: the best of each value of the first that is searched


class Study(NamedTuple):
    """What the study folder's study.json says, and the space file's `derive`."""

    path: Path
    config: config_dict.ConfigDict
    storage: str
    options: search.Options
    pruner: str
    objective: str
    derive: Any
    networks: Networks

    def config_of(self, values: dict, seed: int) -> config_dict.ConfigDict:
        """The config of one run.

        Raises:
          BadSetting: it is not allowed.
        """
        config = self.config.copy_and_resolve_references()
        try:
            with config.ignore_type():  # an integer where the base has "full"
                for field, value in values.items():
                    group, _, name = field.rpartition(".")
                    (config[group] if group else config)[name] = value
                config.seed = self.config.seed + seed
                self.derive(config)
            validate(config, self.networks)
        except Exception as error:  # `derive` is a user's
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise BadSetting(f"--space: {values}: {kind}{' '.join(str(error).split())}") from error
        return config


def read(
    path: Path,
    config: config_dict.ConfigDict,
    chosen: dict,
    shown_storage: str | None,
    there: dict,
    *,
    space_given: bool,
    networks: Networks,
):
    """The study in folder `path` that `config` and the options in `chosen` ask for, and its study.json.

    Args:
      chosen: space (a file), sampler, study_seed, pruner, objective (or None), trials (or None for the whole
        grid), seeds, best_seeds, storage (a database URL, or None for SQLite in the folder), heartbeat_sec.
      shown_storage: the URL without its password.
      there: the study.json that is there, or {}.
      space_given: whether the user named the space file, else `there` does.
      networks: see `config.validate`.
    Raises:
      UserError: an option, the space or a point of it is not allowed; or `there` is another study.
    """
    default = "steps_to_target" if config.train.target_accuracy else "best_val_accuracy"
    chosen = chosen | {"objective": chosen["objective"] or default}
    space_file = read_space_file(path, Path(chosen["space"]), there, networks, given=space_given)
    space, derive, includes, sha256 = space_file
    if includes and chosen["sampler"] != "grid":
        raise UserError(f"--sampler: {chosen['sampler']}; allowed with a space that has includes(): grid")
    settings = number_of_settings(space, includes, chosen, config)
    searched = search.Options(
        space,
        chosen["sampler"],
        chosen["study_seed"],
        settings,
        chosen["seeds"],
        chosen["best_seeds"],
        next((field for field in BEST_BY if field in space), None),
        includes,
    )
    storage = chosen["storage"] or f"sqlite:///{(path / 'study.db').resolve()}"
    study = Study(path, config, storage, searched, chosen["pruner"], chosen["objective"], derive, networks)
    points = search.points(space, chosen["sampler"], chosen["study_seed"], settings, includes)
    for values in points:
        study.config_of(values, 0)
    description = chosen | {
        "space": search.as_json(space),
        "space_file": chosen["space"],
        "space_sha256": sha256,
        "storage": shown_storage,
        "config": config.to_dict(),
        "order_version": batching.ORDER_VERSION,
    }
    if includes:
        description["grid"] = search.grid(space, includes)
    description = json.loads(json.dumps(description))
    refuse_another(path, description, there)
    return study, description


def take_over(config: config_dict.ConfigDict, recorded: dict, path: Path) -> None:
    """Makes `config` the one that the study in folder `path` recorded; names the other places that it will use."""
    platform = recorded.get("devices", {}).get("platform") if isinstance(recorded, dict) else None
    if not isinstance(platform, str):
        raise UserError(f"--study: {path / 'study.json'} holds no config of a study; give --config to start anew")
    before = fields.flatten(config.to_dict())
    # Where hosts meet is the user's to say each time: no folder makes this process call someone.
    recorded = recorded | {"devices": {"platform": platform}}
    with config.unlocked():
        config.update(config_dict.ConfigDict(recorded))
    after = fields.flatten(config.to_dict())
    for field in fields.PATHS:
        value = after[field]
        if isinstance(value, str) and value != before[field] and not reader.lies_in(value, path):
            log.warning("uses %s %s, which %s names", field, value, path)


def read_space_file(path: Path, file: Path, there: dict, networks: Networks, *, given: bool) -> search.SpaceFile:
    """Runs the space file of the study in folder `path`.

    One that only the study.json `there` names is run if it is the user's own, and what the study was started with:
    the folder may come from someone else, and a space file is a program.

    Raises:
      UserError: it is not run, or see `search.read_space`.
    """
    allowed = rules(networks)
    if given:
        return search.read_space(file, allowed, nearest_field)
    why = None
    if not any(reader.lies_in(file, folder) for folder in (ROOT, Path.cwd())):
        why = "lies outside this project and the current folder"
    elif reader.lies_in(file, path):
        why = "lies in that folder itself"
    elif not isinstance(there.get("space_sha256"), str):
        why = "was recorded without a SHA-256"
    if why:
        raise UserError(f"--study: {path} names the space file {file}, which {why}; give --space FILE to run it")
    log.warning("runs the space file %s, which %s names", file, path)
    return search.read_space(file, allowed, nearest_field, there["space_sha256"])


def is_file_in(url: str, folder: Path) -> bool:
    """Whether a database URL is an SQLite file in a folder, once links are followed."""
    parts = sqlalchemy.engine.make_url(url)
    if parts.get_backend_name() != "sqlite" or not parts.database or parts.query:  # which may name another file
        return False
    return reader.lies_in(parts.database, folder)


def number_of_settings(space: search.Space, includes, chosen: dict, config) -> int:
    """How many settings --trials runs are.

    Raises:
      UserError: options that do not go together.
    """
    trials, seeds, sampler, objective = (chosen[name] for name in ("trials", "seeds", "sampler", "objective"))
    most = len(search.grid(space, includes)) if sampler == "grid" else None
    if trials is None and most is None:
        raise UserError(f"--trials: missing; allowed without it: --sampler grid, not {sampler}")
    settings, rest = divmod(most * seeds if trials is None else trials, seeds)
    if rest:
        raise UserError(f"--trials: {trials}; allowed: a multiple of --seeds, {seeds}")
    if most and settings > most:
        raise UserError(f"--trials: {trials}; allowed: up to {most * seeds}, the grid x --seeds")
    if 0 < chosen["best_seeds"] <= seeds:
        raise UserError(f"--best_seeds: {chosen['best_seeds']}; allowed: more than --seeds, {seeds}")
    if objective != "best_val_accuracy":
        if not config.train.target_accuracy:
            raise UserError(f"--objective: {objective} needs train.target_accuracy, which is None")
        if chosen["pruner"] != "none":
            raise UserError(f"--pruner: {chosen['pruner']}; allowed with --objective {objective}: none")
    return settings


def refuse_another(path: Path, description: dict, there: dict) -> None:
    """A study folder holds one study; only what MAY_CHANGE names may change.

    Raises:
      UserError: space, sampler, objective, pruner or config differ from those of the study that is there.
    """
    if there and (changed := fields.differences(identity(description), identity(there), ("here", "there"))):
        raise UserError(f"--study: {path} holds another study: {changed}")


def identity(description: dict) -> dict:
    """The part of a study.json that may not change."""
    kept = {"order_version": 1}  # of studies from before it was recorded
    kept |= {name: value for name, value in description.items() if name not in MAY_CHANGE}
    return kept | {"config": fields.identity(description["config"])}

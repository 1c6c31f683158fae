"""Search spaces: Python files whose `suggest(trial)` names config fields, as in Optuna, and their settings."""

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from ml_collections import config_dict
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial

from largebatch.config.rules import nearest_field
from largebatch.config.values import Rule
from largebatch.util import BadSetting, UserError

Setting = dict[str, Any]  # {dotted config field: value}

# TPE learns from the trials that have ended; the settings of the others are known in advance.
SAMPLERS = ("grid", "random", "quasi-random", "tpe")
MAX_SETTINGS = 10_000
SCALARS = (str, int, float, bool, type(None))

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Space:
    """Content of a space file.

    Attributes:
      suggest: function that suggests config fields to a trial; which ones may depend on the values of earlier ones.
      rules: rule of every config field; see `largebatch.config.rules`.
      derive: function that sets the config fields that depend on the searched ones.
      refine: function that returns the settings to try around a best one, once all others have ended.
      groups: fields; each combination of their values has a best setting of its own.
    """

    suggest: Callable[[BaseTrial], object]
    rules: Mapping[str, Rule]
    derive: Callable[[config_dict.ConfigDict], None] | None = None
    refine: Callable[[Setting], list[Setting]] | None = None
    groups: tuple[str, ...] = ()

    def refined(self, best: Setting) -> list[Setting]:
        """Return the settings to try around a best one.

        Raises:
          UserError: the user's function fails, or a field or value is not allowed.
        """
        if self.refine is None:
            return []
        settings = [dict(values) for values in _call("refine", self.refine, dict(best))]
        for field, value in (item for setting in settings for item in setting.items()):
            check_values(field, [value], self.rules)
        return settings


def read_space(path: Path, rules: Mapping[str, Rule]) -> Space:
    """Run a space file.

    Args:
      rules: see `Space`.
    Raises:
      UserError: the file cannot be run; the message names the line.
    """
    module: dict = {"__name__": "<space>", "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module)
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read ({error.strerror})") from error
    except Exception as error:  # of a user's file
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(f"--space: {path}{where}: {_in_words(error)}") from error
    for name in ("suggest", "derive", "refine"):
        if not callable(module.get(name)) and (name in module or name == "suggest"):
            raise UserError(f"--space: {path}: {name} is {module.get(name)!r}; allowed: a function")
    groups = module.get("GROUPS", ())
    if not isinstance(groups, tuple) or not set(groups) <= set(rules):
        raise UserError(f"--space: {path}: GROUPS is {groups!r}; allowed: a tuple of config fields")
    return Space(module["suggest"], rules, module.get("derive"), module.get("refine"), groups)


def _call(name: str, function: Callable, argument: object) -> Any:
    """Call a function of a space file, and turn its errors into one line."""
    try:
        return function(argument)
    except UserError as error:
        raise UserError(f"--space: {name}(): {error}") from error
    except Exception as error:  # of a user's function
        raise BadSetting(f"--space: {name}(): {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ---- settings that are known in advance -------------------------------------------------------------------


def settings_of(
    space: Space, sampler: str, seed: int, count: int | None
) -> tuple[list[Setting], dict[str, BaseDistribution]]:
    """Return the first `count` settings of a study, none with TPE, which chooses during the study.

    Args:
      seed: seed of the sampler. It and the number of a setting alone decide its values, so a study that is
        restarted or enlarged has the same settings again.
      count: number of settings; None for the whole grid.
    Returns:
      The settings, and the distribution by which a database records each field: the same in all trials, as Optuna
      requires of categorical ones, and optuna-dashboard of those that it draws.
    Raises:
      UserError: a field or value is not allowed, or the grid has too few or too many settings.
    """
    if sampler == "grid":
        settings = _grid(space)
        if count is not None and count > len(settings):
            raise UserError(f"--trials: {count} settings; allowed: up to {len(settings)}, the whole grid")
        refined = [refined for setting in settings for refined in space.refined(setting)]
        return settings[:count], _distributions_of([*settings, *refined])
    if sampler == "quasi-random":
        chosen = optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
    else:
        chosen = optuna.samplers.RandomSampler(seed)
    study = optuna.create_study(sampler=chosen)
    settings, distributions = [], {}
    for _ in range(1 if sampler == "tpe" else count):  # one of TPE, to check the space
        trial = study.ask()
        settings.append(suggest(space, trial))
        distributions |= trial.distributions
        study.tell(trial, 0.0)
    return [] if sampler == "tpe" else settings, distributions


def _grid(space: Space) -> list[Setting]:
    """Walk through all combinations of suggested values, those of the first field changing slowest."""
    settings: list[Setting] = []
    branch: list[int] | None = []
    while branch is not None:
        trial = _GridTrial(branch)
        settings.append(suggest(space, trial))
        if len(settings) > MAX_SETTINGS:
            raise UserError(f"--sampler grid: over {MAX_SETTINGS:,} settings; allowed: fewer, or another sampler")
        branch = trial.next_branch()
    return settings


class _GridTrial:
    """Trial of a grid, which takes the choices of `branch`, and the first ones beyond it."""

    def __init__(self, branch: list[int]):
        self._branch = branch
        self._taken: list[tuple[int, int]] = []  # index and number of choices of each suggestion

    def suggest_categorical(self, name: str, choices: Sequence) -> Any:
        place = len(self._taken)
        index = self._branch[place] if place < len(self._branch) else 0
        self._taken.append((index, len(choices)))
        return choices[index]

    def suggest_float(self, name: str, low: float, high: float, *, step=None, log=False) -> float:
        if step is None or log:
            raise UserError(
                f"--sampler grid: {name} is a range; allowed: suggest_categorical, or a range with a step"
            )
        count = math.floor((high - low) / step + 1e-9) + 1
        # Ten digits, so that 0.1 + 2 * 0.1 is 0.3.
        return self.suggest_categorical(name, [float(f"{low + index * step:.10g}") for index in range(count)])

    def suggest_int(self, name: str, low: int, high: int, *, step=1, log=False) -> int:
        if log:
            raise UserError(f"--sampler grid: {name} is logarithmic; allowed: suggest_categorical, or without log")
        return self.suggest_categorical(name, range(low, high + 1, step))

    def next_branch(self) -> list[int] | None:
        """Return the choices that lead to the next setting; None after the last."""
        indices = list(self._taken)
        while indices and indices[-1][0] + 1 == indices[-1][1]:
            indices.pop()
        if not indices:
            return None
        return [index for index, _ in indices[:-1]] + [indices[-1][0] + 1]


# ---- suggestions, checked and recorded --------------------------------------------------------------------


def suggest(space: Space, trial: BaseTrial) -> Setting:
    """Return the values that a space suggests to a trial.

    Raises:
      UserError: a field or one of its values is not allowed, or the user's function fails.
    """
    checked = _CheckedTrial(trial, space.rules)
    _call("suggest", space.suggest, checked)
    if not checked.values:
        raise UserError("--space: suggest() suggests no field; allowed: trial.suggest_categorical(FIELD, CHOICES)")
    return checked.values


class _CheckedTrial:
    """Trial that refuses fields and values that the config does not allow, and records the others."""

    def __init__(self, trial: BaseTrial, rules: Mapping[str, Rule]):
        self._trial, self._rules = trial, rules
        self.values: Setting = {}

    def suggest_categorical(self, name: str, choices: Sequence) -> Any:
        choices = list(choices)
        texts = [json.dumps(choice) for choice in choices]
        if not choices or len(set(texts)) < len(texts):
            raise UserError(f"{name}: {choices!r}; allowed: different choices, at least one")
        self._check(name, choices)
        if all(isinstance(choice, SCALARS) for choice in choices):
            value = self._trial.suggest_categorical(name, choices)
        else:  # a database keeps scalars alone: other choices are suggested as their JSON
            value = choices[texts.index(self._trial.suggest_categorical(name, texts))]
        self.values[name] = value
        return value

    def suggest_float(self, name: str, low: float, high: float, **options) -> float:
        self._check(name, (low, high))
        self.values[name] = self._trial.suggest_float(name, low, high, **options)
        return self.values[name]

    def suggest_int(self, name: str, low: int, high: int, **options) -> int:
        self._check(name, (low, high))
        self.values[name] = self._trial.suggest_int(name, low, high, **options)
        return self.values[name]

    def _check(self, name: str, values: Sequence) -> None:
        if name in self.values:
            raise UserError(f"{name}: suggested twice; allowed: once")
        check_values(name, values, self._rules)


def check_values(field: str, values: Sequence, rules: Mapping[str, Rule]) -> None:
    """Refuse to search a field, or values of it.

    Raises:
      UserError: the field is unknown or shapes no result, or a value is not allowed.
    """
    if field not in rules:
        raise UserError(f"{field}: unknown field{nearest_field(field)}")
    if field == "seed":
        raise UserError("seed: cannot be searched (use --seeds)")
    if not rules[field].identity:  # the field does not affect a run's results
        raise UserError(f"{field}: cannot be searched")
    if field == "model.dtype" and "auto" in values:
        raise UserError("model.dtype: 'auto' cannot be searched; allowed: float32 | bfloat16")
    for value in values:
        if not rules[field].allows(tuple(value) if isinstance(value, list) else value):
            raise UserError(f"{field}: {value!r}; allowed: {rules[field].text}")


def _distributions_of(settings: Sequence[Setting]) -> dict[str, BaseDistribution]:
    """Return for each field a distribution that holds all its values in `settings`, as databases record them."""
    values_of: dict[str, list] = {}
    for setting in settings:
        for field, value in setting.items():
            values_of.setdefault(field, []).append(value)
    distributions = {}
    for field, values in values_of.items():
        kinds = {type(value) for value in values}
        if kinds <= {int, float}:
            kind = IntDistribution if kinds == {int} else FloatDistribution
            distributions[field] = kind(min(values), max(values))
        else:
            distributions[field] = CategoricalDistribution(tuple(dict.fromkeys(map(recorded, values))))
    return distributions


def recorded(value: Any) -> Any:
    """Return a value as a database records it: a scalar, or the JSON of anything else."""
    return value if isinstance(value, SCALARS) else json.dumps(value)


def tpe_sampler(study_seed: int, index: int) -> optuna.samplers.TPESampler:
    """Create a sampler seeded by (study seed, setting), so that a restarted sweep does not repeat its draws."""
    rng = np.random.default_rng([study_seed, index])
    return optuna.samplers.TPESampler(seed=int(rng.integers(2**32)))

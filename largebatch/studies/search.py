"""Settings that a study tries: points of a grid, of random or quasi-random search, or those that TPE chooses.

Except with TPE, setting number k depends on (study seed, k) alone. So a sweep that is killed and started again, or
shared by several processes, tries the same settings.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from largebatch.studies.space import Space
from largebatch.tasks.kinds import TaskKind
from largebatch.util import UserError

# TPE has no points of its own: it learns from the trials that ended.
SAMPLERS = ("grid", "random", "quasi-random", "tpe")
FIRST_OF_GROUP = 2  # trials that a group ends before its median ends others
FIRST_VALIDATIONS = 10  # validations that do not prune: in warm-up the lowest rate leads


class MedianOfGroup(optuna.pruners.MedianPruner):
    """Pruner of trials whose accuracy is below the median of their group after as many validations.

    Args:
      fields: fields whose values define a group of trials.
    """

    def __init__(self, fields: tuple[str, ...], kind: TaskKind):
        super().__init__(n_startup_trials=FIRST_OF_GROUP, n_warmup_steps=FIRST_VALIDATIONS)
        self._fields, self._kind = fields, kind

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Return True if the trial should end."""
        return super().prune(_Group(study, self._fields, self._kind, trial), trial)


@dataclass(frozen=True)
class _Group:
    """View of a study for a MedianPruner: the trials of one group, by their score."""

    study: optuna.Study
    fields: tuple[str, ...]
    kind: TaskKind
    trial: FrozenTrial

    @property
    def direction(self) -> StudyDirection:
        """Direction of the reported score, whatever the study's objective is."""
        return StudyDirection.MAXIMIZE if self.kind.higher_is_better else StudyDirection.MINIMIZE

    def get_trials(self, **options) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(**options) if self._key(trial) == self._key(self.trial)]

    def _key(self, trial: FrozenTrial) -> list:
        values = trial.user_attrs.get("values", {})
        return [values.get(field) for field in self.fields]


PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "successive-halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
MAX_GRID = 10_000  # most points that are tried
MAX_COMBINATIONS = 1_000_000  # most points before `includes` leaves some out


def create_pruner(name: str, groups: tuple[str, ...], kind: TaskKind) -> optuna.pruners.BasePruner:
    """Create the pruner `name`, a key of PRUNERS; "median" is that of the trial's group if there are groups."""
    return MedianOfGroup(groups, kind) if groups and name == "median" else PRUNERS[name]()


@dataclass(frozen=True)
class SearchOptions:
    """Options that determine the runs of a study.

    First each of `settings` settings is run with `seeds` seeds. Then come the settings that `refine` derives from
    the best one. Then the best of all gets more seeds, up to `best_seeds` in all. If `best_by` names fields, each
    combination of their values has a best setting of its own.

    Attributes:
      includes: predicate of the points of the space that belong to its grid; None for all.
      refine: function that returns further settings around a best one; None for none.
    """

    space: Space
    sampler: str
    study_seed: int
    settings: int
    seeds: int = 1
    best_seeds: int = 0
    best_by: tuple[str, ...] = ()
    includes: Callable[[dict], bool] | None = None
    refine: Callable[[dict], list[dict]] | None = None

    def group_of(self, values: dict) -> str:
        """Return the combination of values of `best_by` that a setting belongs to."""
        return json.dumps([values.get(field) for field in self.best_by])


# ---- fixed settings -------------------------------------------------------------------------------------


def fixed_settings(options: SearchOptions) -> list[dict]:
    """Return the values of every setting, {field: value}; empty with TPE, which chooses during the study."""
    if options.sampler == "tpe":
        return []
    if options.sampler == "grid":
        return grid(options.space, options.includes)[: options.settings]
    return [_sample(options, setting) for setting in range(options.settings)]


def grid(space: Space, includes: Callable[[dict], bool] | None = None) -> list[dict]:
    """Return all points that `includes` accepts, the first field changing slowest.

    Raises:
      UserError: a field has no finite number of values, or there are too many points, or none.
    """
    values_of = {field: _grid_values(field, distribution) for field, distribution in space.items()}
    combinations = math.prod(map(len, values_of.values()))
    if combinations > MAX_COMBINATIONS:
        raise UserError(
            f"--sampler grid: {combinations:,} combinations; "
            f"allowed: up to {MAX_COMBINATIONS:,}, or another sampler"
        )
    points = []
    for values in itertools.product(*values_of.values()):
        point = dict(zip(values_of, values, strict=True))
        if includes is None or _is_included(includes, point):
            points.append(point)
        if len(points) > MAX_GRID:
            raise UserError(f"--sampler grid: over {MAX_GRID:,} points; allowed: fewer, or another sampler")
    if not points:
        raise UserError("--sampler grid: includes() of the space file takes no point")
    return points


def _is_included(includes: Callable[[dict], bool], point: dict) -> bool:
    try:
        return bool(includes(point))
    except Exception as error:  # of a user's function
        raise UserError(f"--space: includes(): {type(error).__name__}: {' '.join(str(error).split())}") from error


def _grid_values(field: str, distribution: BaseDistribution) -> list:
    """Return the values of one field, ascending if it is a range.

    Raises:
      UserError: the field is a range without a step.
    """
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if distribution.step is None or distribution.log:
        raise UserError(
            f"--sampler grid: {field} is a range; allowed: a CategoricalDistribution, or a range with a step"
        )
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [_nearest_value(distribution, distribution.low + i * distribution.step) for i in range(count)]


def _sample(options: SearchOptions, setting: int) -> dict:
    """Return the values of one setting of random or quasi-random search."""
    space, seed = options.space, options.study_seed
    if options.sampler == "random":
        unit = np.random.default_rng([seed, setting]).random(len(space))
    else:
        from scipy.stats import qmc  # scrambled Sobol' points: the first 2^m of them fill space evenly

        sobol = qmc.Sobol(len(space), rng=seed)
        if setting:
            sobol.fast_forward(setting)
        unit = sobol.random(1)[0]
    return {
        field: _value_at(distribution, position)
        for (field, distribution), position in zip(space.items(), unit, strict=True)
    }


def _value_at(distribution: BaseDistribution, position: float):
    """Return the value at `position`, in [0, 1), of a field's range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(position * len(distribution.choices))]
    half_step = (distribution.step or 0) / 2  # so that the two ends are as frequent as the values between
    low, high = distribution.low - half_step, distribution.high + half_step
    if distribution.log:
        number = math.exp(math.log(low) + position * (math.log(high) - math.log(low)))
    else:
        number = low + position * (high - low)
    return _nearest_value(distribution, number)


def _nearest_value(distribution: BaseDistribution, number: float) -> int | float:
    """Return the value of a numeric range that is nearest to `number`."""
    if distribution.step is not None:
        steps = round((number - distribution.low) / distribution.step)
        number = distribution.low + steps * distribution.step
    number = min(max(number, distribution.low), distribution.high)
    return round(number) if isinstance(distribution, IntDistribution) else float(number)


def refined(options: SearchOptions, best: dict) -> list[dict]:
    """Return the settings to try around the best one of a group.

    Raises:
      UserError: the user's function fails, or returns a point outside the space.
    """
    if options.refine is None:
        return []
    try:
        settings = [dict(values) for values in options.refine(dict(best))]
    except Exception as error:  # of a user's function
        raise UserError(f"--space: refine(): {type(error).__name__}: {' '.join(str(error).split())}") from error
    for values in settings:
        if values.keys() != options.space.keys():
            fields = ", ".join(options.space)
            raise UserError(f"--space: refine() gave {values}; allowed: a value for each of {fields}")
        for field, distribution in options.space.items():
            allowed = _grid_values(field, distribution)
            if values[field] not in allowed:
                raise UserError(f"--space: refine() gave {field} {values[field]!r}; allowed: {allowed}")
    return settings


# ---- settings that Optuna suggests ----------------------------------------------------------------------


def suggest_values(trial: optuna.Trial, space: Space) -> dict:
    """Return the values that were fixed for a trial when it was enqueued, or else those of its sampler."""
    values = {}
    for field, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            values[field] = trial.suggest_categorical(field, distribution.choices)
            continue
        suggest = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
        values[field] = suggest(
            field, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    return values


def tpe_sampler(study_seed: int, setting: int) -> optuna.samplers.TPESampler:
    """Create a sampler seeded by (study seed, setting), so that a restarted sweep does not repeat its draws."""
    rng = np.random.default_rng([study_seed, setting])
    return optuna.samplers.TPESampler(seed=int(rng.integers(2**32)))

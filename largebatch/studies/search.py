"""Which settings a study tries: points of a grid, of random or quasi-random search, or what TPE chooses.

Setting number k of all but TPE follows from (study seed, k) alone. So a sweep that is killed and started again,
or shared by several processes, tries the same settings.
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

# TPE has no points of its own: it looks at the trials that ended.
SAMPLERS = ("grid", "random", "quasi-random", "tpe")
FIRST_OF_GROUP = 2  # trials that a group ends before its median ends others
FIRST_VALIDATIONS = 10  # that no trial is judged by: in warm-up the lowest rate leads


class MedianOfGroup(optuna.pruners.MedianPruner):
    """Ends a trial whose accuracy is below the median that the trials of its group had after as many validations.

    Args:
      fields: trials with the same values of these are a group.
    """

    def __init__(self, fields: tuple[str, ...], kind: TaskKind):
        super().__init__(n_startup_trials=FIRST_OF_GROUP, n_warmup_steps=FIRST_VALIDATIONS)
        self._fields, self._kind = fields, kind

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether the trial should end."""
        return super().prune(_Group(study, self._fields, self._kind, trial), trial)


@dataclass(frozen=True)
class _Group:
    """As much of a study as a MedianPruner asks for: the trials of one group, by their score."""

    study: optuna.Study
    fields: tuple[str, ...]
    kind: TaskKind
    trial: FrozenTrial

    @property
    def direction(self) -> StudyDirection:
        """Of what is reported, the score, whatever the study's objective is."""
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
MAX_GRID = 10_000  # points that are tried
MAX_COMBINATIONS = 1_000_000  # before `includes` leaves some out


def create_pruner(name: str, groups: tuple[str, ...], kind: TaskKind) -> optuna.pruners.BasePruner:
    """The pruner called `name`, a key of PRUNERS; "median" is that of the trial's group where there are groups."""
    return MedianOfGroup(groups, kind) if groups and name == "median" else PRUNERS[name]()


@dataclass(frozen=True)
class SearchOptions:
    """Which runs a study has.

    First each of `settings` settings is run with `seeds` seeds. Then come the settings that `refine` makes of the
    best one. Then the best of all gets more seeds, up to `best_seeds` in all. Where `best_by` names fields, each
    combination of their values has a best setting of its own.

    Attributes:
      includes: which points of the space belong to its grid; None for all.
      refine: further settings around a best one; None for none.
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
        """The combination of values of `best_by` that a setting belongs to."""
        return json.dumps([values.get(field) for field in self.best_by])


# ---- settings that are known before a run --------------------------------------------------------------


def fixed_settings(options: SearchOptions) -> list[dict]:
    """The values of every setting, {field: value}; empty with TPE, which chooses as it goes."""
    if options.sampler == "tpe":
        return []
    if options.sampler == "grid":
        return grid(options.space, options.includes)[: options.settings]
    return [_sample(options, setting) for setting in range(options.settings)]


def grid(space: Space, includes: Callable[[dict], bool] | None = None) -> list[dict]:
    """All points that `includes` accepts, the first field changing slowest.

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
    except Exception as error:  # whatever a user's function raises
        raise UserError(f"--space: includes(): {type(error).__name__}: {' '.join(str(error).split())}") from error


def _grid_values(field: str, distribution: BaseDistribution) -> list:
    """The values of one field, ascending where it is a range.

    Raises:
      UserError: it is a range without a step.
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
    """The values of one setting of random or quasi-random search."""
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
    """The value at `position`, in [0, 1), of a field's range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(position * len(distribution.choices))]
    half_step = (distribution.step or 0) / 2  # so that the two ends come as often as the values between
    low, high = distribution.low - half_step, distribution.high + half_step
    if distribution.log:
        number = math.exp(math.log(low) + position * (math.log(high) - math.log(low)))
    else:
        number = low + position * (high - low)
    return _nearest_value(distribution, number)


def _nearest_value(distribution: BaseDistribution, number: float) -> int | float:
    """The value of a numeric range that is nearest to `number`."""
    if distribution.step is not None:
        steps = round((number - distribution.low) / distribution.step)
        number = distribution.low + steps * distribution.step
    number = min(max(number, distribution.low), distribution.high)
    return round(number) if isinstance(distribution, IntDistribution) else float(number)


def refined(options: SearchOptions, best: dict) -> list[dict]:
    """The settings to try around the best one of a group.

    Raises:
      UserError: the user's function fails, or gives what is no point of the space.
    """
    if options.refine is None:
        return []
    try:
        settings = [dict(values) for values in options.refine(dict(best))]
    except Exception as error:  # whatever a user's function raises
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


# ---- settings that Optuna is asked for ------------------------------------------------------------------


def suggest_values(trial: optuna.Trial, space: Space) -> dict:
    """The values that were fixed for a trial when it was enqueued, or else what its sampler chooses."""
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
    """A sampler whose draws follow from (study seed, setting): a restarted sweep does not repeat its draws."""
    rng = np.random.default_rng([study_seed, setting])
    return optuna.samplers.TPESampler(seed=int(rng.integers(2**32)))

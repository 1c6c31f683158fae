"""Search spaces: read from a file, checked field by field, and which point of a space a setting is.

A point of a grid, of random or of quasi-random search follows from (seed, number of the setting) alone. So
a sweep that is killed and started again, or shared by several processes, tries the same points.
"""

import hashlib
import itertools
import json
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optuna
from optuna import distributions

from largebatch.errors import UserError

# "tpe" has no points of its own: it looks at the trials that ended.
SAMPLERS = ("grid", "random", "quasi-random", "tpe")
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    "successive-halving": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
# Not shaping a run's numbers, or with an option of their own.
NOT_SEARCHED = ("devices", "log", "checkpoint", "seed", "augment.cache_dir", "dataset.max_image_pixels")

MAX_GRID, MAX_PRODUCT = 10_000, 1_000_000

Space = dict[str, distributions.BaseDistribution]


class Options(NamedTuple):
    """What is to be run.

    `settings` settings are searched with `seeds` seeds each; then the best setting of each value of
    `best_by` (a field, or None for one best) gets `best_seeds` seeds in all.
    """

    space: Space
    sampler: str
    study_seed: int
    settings: int
    seeds: int
    best_seeds: int
    best_by: str | None
    includes: Callable[[dict], bool] | None = None


class SpaceFile(NamedTuple):
    """A space; `derive(config)`, which sets fields that follow from the searched ones; which points a grid has.

    `sha256` is of the bytes that were run.
    """

    space: Space
    derive: Callable
    includes: Callable[[dict], bool] | None
    sha256: str


def read_space(
    path: Path, rules: dict, nearest: Callable[[str], str], expected_sha256: str | None = None
) -> SpaceFile:
    """Runs a space file: `get_space()` gives {field: optuna distribution}.

    Optional are `derive(config)`, and `includes(values)`, which says of each point of a grid whether to try it.

    Args:
      rules: field -> (is a value allowed?, what is allowed).
      nearest: unknown field -> hint.
      expected_sha256: of the file, which is not run if it has another.
    Raises:
      UserError: the file cannot be run, or names unknown fields or values that are not allowed; all of them.
    """
    if not path.is_file():
        raise UserError(f"--space: {path} is not a file")
    try:
        content = path.read_bytes()  # once: what is hashed is what is run
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read ({error.strerror})") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if expected_sha256 not in (None, sha256):
        raise UserError(f"--space: {path} has changed since the study was started; give --space FILE to run it")
    module: dict = {"__name__": "<space>", "__file__": str(path)}
    try:
        exec(compile(content, str(path), "exec", dont_inherit=True), module)
        if not callable(module.get("get_space")):
            raise UserError(f"--space: {path} has no function get_space()")
        space = module["get_space"]()
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(
            f"--space: {path}{where}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(space, dict) or not space:
        raise UserError(f"--space: {path}: get_space() gave {space!r}; allowed: {{field: optuna distribution}}")
    for name in ("derive", "includes"):
        if name in module and not callable(module[name]):
            raise UserError(f"--space: {path}: {name} is {module[name]!r}; allowed: a function")
    for values in space.values():
        if isinstance(values, optuna.distributions.CategoricalDistribution):  # a database would give lists back
            values.choices = tuple(list(one) if isinstance(one, tuple) else one for one in values.choices)
    problems = [text for field, values in space.items() for text in _problems(field, values, rules, nearest)]
    if problems:
        raise UserError(f"--space: {path}: {'; '.join(problems)}")
    return SpaceFile(space, module.get("derive", lambda config: None), module.get("includes"), sha256)


def _problems(field: str, values, rules: dict, nearest: Callable[[str], str]) -> list[str]:
    if field not in rules:
        return [f"{field}: unknown field{nearest(field)}"]
    if any(field == name or field.startswith(f"{name}.") for name in NOT_SEARCHED):
        return [f"{field}: cannot be searched" + (" (use --seeds)" if field == "seed" else "")]
    if isinstance(values, distributions.CategoricalDistribution):
        tried = values.choices
        allowed, text = rules[field]
        if bad := [f"{field}: {value!r}; allowed: {text}" for value in tried if not allowed(value)]:
            return bad
        if len({json.dumps(value) for value in tried}) < len(tried):
            return [f"{field}: a choice comes twice in {tried!r}"]
    elif isinstance(values, distributions.FloatDistribution | distributions.IntDistribution):
        tried = (values.low, values.high)
    else:
        return [f"{field}: {values!r}; allowed: a FloatDistribution, IntDistribution or CategoricalDistribution"]
    allowed, text = rules[field]
    return [f"{field}: {value!r}; allowed: {text}" for value in tried if not allowed(value)]


def as_json(space: Space) -> dict:
    """The space as plain JSON, the same for the same space."""
    return {field: json.loads(distributions.distribution_to_json(values)) for field, values in space.items()}


def grid(space: Space, includes: Callable[[dict], bool] | None = None) -> list[dict]:
    """All points that `includes` takes, the first field changing slowest.

    Raises:
      UserError: a field has no finite number of values, or there are too many points, or none.
    """
    values = {}
    for field, one in space.items():
        if isinstance(one, distributions.CategoricalDistribution):
            values[field] = list(one.choices)
        elif one.step is not None and not one.log:
            count = round((one.high - one.low) / one.step) + 1
            values[field] = [_rounded(one, one.low + i * one.step) for i in range(count)]
        else:
            raise UserError(
                f"--sampler grid: {field} is a range; allowed: a CategoricalDistribution, or a range with a step"
            )
    count = math.prod(map(len, values.values()))
    if count > MAX_PRODUCT:
        raise UserError(
            f"--sampler grid: {count:,} combinations; allowed: up to {MAX_PRODUCT:,}, or another sampler"
        )
    all_points = (dict(zip(values, point, strict=True)) for point in itertools.product(*values.values()))
    try:
        found = list(itertools.islice(filter(includes or (lambda point: True), all_points), MAX_GRID + 1))
    except Exception as error:  # whatever a user's function raises
        raise UserError(f"--space: includes(): {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not found:
        raise UserError("--sampler grid: includes() of the space file takes no point")
    if len(found) > MAX_GRID:
        raise UserError(f"--sampler grid: over {MAX_GRID:,} points; allowed: fewer, or another sampler")
    return found


def points(
    space: Space, sampler: str, seed: int, settings: int, includes: Callable[[dict], bool] | None = None
) -> list[dict]:
    """The first settings of a sampler; none of TPE, which chooses as it goes."""
    if sampler == "tpe":
        return []
    if sampler == "grid":
        return grid(space, includes)[:settings]
    return [_point(space, sampler, seed, setting) for setting in range(settings)]


def _point(space: Space, sampler: str, seed: int, setting: int) -> dict:
    if sampler == "random":
        unit = np.random.default_rng([seed, setting]).random(len(space))
    else:
        from scipy.stats import qmc  # Sobol' points, scrambled: the first 2^m of them fill space evenly

        sobol = qmc.Sobol(len(space), rng=seed)
        if setting:
            sobol.fast_forward(setting)
        unit = sobol.random(1)[0]
    return {field: _value(values, u) for (field, values), u in zip(space.items(), unit, strict=True)}


def _value(values: distributions.BaseDistribution, unit: float):
    """The value at `unit` in [0, 1) of a field's range."""
    if isinstance(values, distributions.CategoricalDistribution):
        return values.choices[int(unit * len(values.choices))]
    half = (values.step or 0) / 2  # so that the ends come as often as the others
    low, high = values.low - half, values.high + half
    if values.log:
        return _rounded(values, math.exp(math.log(low) + unit * (math.log(high) - math.log(low))))
    return _rounded(values, low + unit * (high - low))


def _rounded(values, number: float):
    """The nearest value that the range has."""
    if values.step is not None:
        number = values.low + round((number - values.low) / values.step) * values.step
    number = min(max(number, values.low), values.high)
    return round(number) if isinstance(values, distributions.IntDistribution) else float(number)


def suggest(trial: optuna.Trial, space: Space) -> dict:
    """What was fixed for the trial when it was put in the queue, or what its sampler chooses."""
    values = {}
    for field, one in space.items():
        if isinstance(one, distributions.CategoricalDistribution):
            values[field] = trial.suggest_categorical(field, one.choices)
        else:
            ask = trial.suggest_int if isinstance(one, distributions.IntDistribution) else trial.suggest_float
            values[field] = ask(field, one.low, one.high, step=one.step, log=one.log)
    return values


def tpe(seed: int, setting: int) -> optuna.samplers.TPESampler:
    """A sampler whose draws follow from (seed, setting), so that a restarted sweep does not repeat its draws."""
    return optuna.samplers.TPESampler(seed=int(np.random.default_rng([seed, setting]).integers(2**32)))

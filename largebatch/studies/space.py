"""Search spaces: Python files that define {config field: distribution}, with checks of every field."""

import hashlib
import json
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ml_collections import config_dict
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from largebatch.config.rules import nearest_field
from largebatch.config.values import Rule
from largebatch.util import UserError

Space = dict[str, BaseDistribution]

# A choice that is a tuple is stored as JSON, which Optuna supports but advises against.
warnings.filterwarnings("ignore", message="Choices for a categorical distribution should be a tuple")


@dataclass(frozen=True)
class SpaceFile:
    """Content of a space file.

    Attributes:
      space: {dotted config field: distribution}.
      derive: function that sets the config fields that depend on the searched ones.
      includes: predicate of the points of a grid; None for all points.
      refine: function that returns the settings to try around the best one, after the grid; None for none.
      groups: fields; each combination of their values has a best setting of its own. Empty if the file has none.
      sha256: SHA-256 of the bytes that were run; None where there is no file.
    """

    space: Space
    derive: Callable[[config_dict.ConfigDict], None]
    includes: Callable[[dict], bool] | None
    sha256: str | None
    refine: Callable[[dict], list[dict]] | None = None
    groups: tuple[str, ...] = ()


def read_space(path: Path, rules: Mapping[str, Rule], expected_sha256: str | None = None) -> SpaceFile:
    """Run a space file, whose `get_space()` returns {field: optuna distribution}.

    The functions `derive(config)`, `includes(values)` and `refine(best)` and the tuple GROUPS are optional; see
    `SpaceFile`.

    Args:
      rules: rules of every config field; see `largebatch.config.rules`.
      expected_sha256: required digest of the file; None accepts any file.
    Raises:
      UserError: the file cannot be run, or has unknown fields or values that are not allowed; all are named.
    """
    if not path.is_file():
        raise UserError(f"--space: {path} is not a file")
    try:
        content = path.read_bytes()  # read once, so that the hashed bytes are run
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read ({error.strerror})") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise UserError(f"--space: {path} has changed since the study was started; give --space FILE to run it")
    module, space = _run(path, content)
    if not isinstance(space, dict) or not space:
        raise UserError(f"--space: {path}: get_space() gave {space!r}; allowed: {{field: optuna distribution}}")
    for name in ("derive", "includes", "refine"):
        if name in module and not callable(module[name]):
            raise UserError(f"--space: {path}: {name} is {module[name]!r}; allowed: a function")
    groups = module.get("GROUPS", ())
    if not isinstance(groups, tuple) or not set(groups) <= set(space):
        raise UserError(f"--space: {path}: GROUPS is {groups!r}; allowed: a tuple of fields of get_space()")
    _make_tuples_lists(space)
    problems = [problem for field, values in space.items() for problem in _problems(field, values, rules)]
    if problems:
        raise UserError(f"--space: {path}: {'; '.join(problems)}")
    return SpaceFile(
        space,
        derive=module.get("derive", _derive_nothing),
        includes=module.get("includes"),
        sha256=sha256,
        refine=module.get("refine"),
        groups=groups,
    )


def as_json(space: Space) -> dict:
    """Return the space as plain JSON, equal for equal spaces."""
    return {field: json.loads(distribution_to_json(distribution)) for field, distribution in space.items()}


def _run(path: Path, content: bytes) -> tuple[dict, object]:
    """Run the file; return its names and the result of get_space().

    Raises:
      UserError: the file raised an error; the message has the line.
    """
    module: dict = {"__name__": "<space>", "__file__": str(path)}
    try:
        exec(compile(content, str(path), "exec", dont_inherit=True), module)
        if not callable(module.get("get_space")):
            raise UserError(f"--space: {path} has no function get_space()")
        return module, module["get_space"]()
    except UserError:
        raise
    except Exception as error:  # of a user's file
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(
            f"--space: {path}{where}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _make_tuples_lists(space: Space) -> None:
    """Convert choices that are tuples to lists, as a database returns them."""
    for distribution in space.values():
        if isinstance(distribution, CategoricalDistribution):
            distribution.choices = tuple(
                list(choice) if isinstance(choice, tuple) else choice for choice in distribution.choices
            )


def _derive_nothing(config: config_dict.ConfigDict) -> None:
    pass


def _problems(field: str, distribution: object, rules: Mapping[str, Rule]) -> list[str]:
    """Return the problems of one field of a space, a line each."""
    if field not in rules:
        return [f"{field}: unknown field{nearest_field(field)}"]
    if field == "seed":
        return ["seed: cannot be searched (use --seeds)"]
    if not rules[field].identity:  # the field does not affect a run's results
        return [f"{field}: cannot be searched"]
    if isinstance(distribution, CategoricalDistribution):
        tried = [tuple(choice) if isinstance(choice, list) else choice for choice in distribution.choices]
    elif isinstance(distribution, FloatDistribution | IntDistribution):
        tried = (distribution.low, distribution.high)
    else:
        return [
            f"{field}: {distribution!r}; allowed: a FloatDistribution, IntDistribution or CategoricalDistribution"
        ]
    if field == "model.dtype" and "auto" in tried:
        return ["model.dtype: 'auto' cannot be searched; allowed: float32 | bfloat16"]
    rule = rules[field]
    problems = [f"{field}: {value!r}; allowed: {rule.text}" for value in tried if not rule.allows(value)]
    if problems:
        return problems
    if isinstance(distribution, CategoricalDistribution):
        different = {json.dumps(value) for value in tried}
        if len(different) < len(tried):
            return [f"{field}: a choice comes twice in {tried!r}"]
    return []

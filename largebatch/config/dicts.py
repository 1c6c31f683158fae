"""A config as nested dicts: its defaults, its fields by name, what identifies a run, and how two differ."""

import dataclasses
import types
import typing
from typing import TYPE_CHECKING

from largebatch.config.fields import Config
from largebatch.config.values import Rule

if TYPE_CHECKING:  # reports are drawn without it
    from ml_collections import config_dict

SECTIONS: dict[str, type] = {
    field.name: field.type for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)
}
FIELDS: dict[str, dataclasses.Field] = {
    **{
        f"{name}.{field.name}": field for name, section in SECTIONS.items() for field in dataclasses.fields(section)
    },
    **{field.name: field for field in dataclasses.fields(Config) if field.name not in SECTIONS},
}
RULES: dict[str, Rule] = {name: field.metadata["rule"] for name, field in FIELDS.items()}
PATHS = tuple(name for name, rule in RULES.items() if rule.path)
DATA_PATHS = tuple(name for name in PATHS if name.startswith("dataset."))


def defaults() -> "config_dict.ConfigDict":
    """Return all fields with their defaults, as config files take them to show their difference."""
    from ml_collections import config_dict

    config = config_dict.ConfigDict({name: config_dict.ConfigDict() for name in SECTIONS})
    for name, field in FIELDS.items():
        section, _, last_name = name.rpartition(".")
        kinds = [kind for kind in kinds_of(field) if kind is not type(None)]
        value = field.default
        if len(kinds) > 1 and value is not None:  # or the command line could not change its type
            value = config_dict.FieldReference(value, field_type=object)
        elif value is None:
            value = config_dict.placeholder(kinds[0] if len(kinds) == 1 else object)
        (config[section] if section else config)[last_name] = value
    return config


def kinds_of(field: dataclasses.Field) -> tuple[type, ...]:
    """Return the types that a field may have."""
    return typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Return {"section.field": value} of nested dicts."""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def difference(one: dict, other: dict, names: tuple[str, str]) -> str:
    """Return the fields in which two nested dicts differ, in one line; empty where they agree.

    Args:
      names: what to call the two: ("here", "there").
    """
    one, other = flatten(one), flatten(other)
    return "; ".join(
        f"{field}: {one.get(field, 'missing')!r} {names[0]}, {other.get(field, 'missing')!r} {names[1]}"
        for field in sorted(one.keys() | other.keys())
        if one.get(field, "missing") != other.get(field, "missing")
    )


def identity(config: dict) -> dict:
    """Return the fields of a nested config that shape a run's numbers, as {"section.field": value}."""
    return {name: value for name, value in flatten(config).items() if name not in RULES or RULES[name].identity}


def identity_of_run(config: dict) -> dict:
    """Return the identity without the places of the data, whose checksums are in every checkpoint."""
    return {name: value for name, value in identity(config).items() if name not in DATA_PATHS}

"""The kinds of values that fields of a config may have; see `fields`."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Rule:
    """The rule of a field: its allowed values, and what it decides.

    Attributes:
      allows: returns True for a value that is allowed.
      text: what is allowed, as error messages say it.
      identity: True if a run with another value is another run. Studies search no other fields.
      path: True if it may name a file or folder.
      data: True if it decides which data lie on the devices.
    """

    allows: Callable[[object], bool]
    text: str
    identity: bool = True
    path: bool = False
    data: bool = False


def stated(default: object, allows: Callable[[object], bool], text: str, **flags: bool) -> Any:
    """State a field with any rule; `flags` are the last attributes of `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(allows, text, **flags)})


def _or_word(default: object, word: object, allows: Callable[[object], bool], text: str, flags: dict) -> Any:
    """State a field that may be a word in place of other values: `word`, or a default that is none of these."""
    if word is None and allows(default):
        return stated(default, allows, text, **flags)
    word = default if word is None else word
    return stated(default, lambda value: value == word or allows(value), f"{text}, or {word!r}", **flags)


def one_of(*names: str, **flags: bool) -> Any:
    """State a field that is one of these names; the first is the default."""
    return stated(names[0], lambda value: isinstance(value, str) and value in names, " | ".join(names), **flags)


def flag(default: bool, **flags: bool) -> Any:
    """State a field that is true or false."""
    return stated(default, lambda value: isinstance(value, bool), "true | false", **flags)


def text(default: str | None, **flags: bool) -> Any:
    """State a field that is a text; None is allowed where it is the default."""
    return _or_word(default, None, is_text, "a text", flags)


def is_text(value: object) -> bool:
    """Tell whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def integer(default: object, low: int, high: int | None = None, word: object = None, **flags: bool) -> Any:
    """State a field that is an integer of a range, or a word; a default that is no integer is that word."""
    what = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    return _or_word(default, word, lambda value: is_integer(value, low, high), what, flags)


def is_integer(value: object, low: int, high: int | None = None) -> bool:
    """Tell whether a value is an integer of a range, both ends included."""
    return (
        isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    )


def number(default: object, interval: str = "(-inf, inf)", **flags: bool) -> Any:
    """State a field that is a number of an interval in float32, or a default that is no number.

    Args:
      interval: "[0, 1)" has 0 and not 1. A value counts as training has it, in float32: there 0.99999999 is 1, and
        1e-50 is 0.
    """
    low, high = map(float, interval[1:-1].split(","))
    above, below = interval[0] == "[", interval[-1] == "]"

    def allows(value):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= LARGEST:  # nan too
            return False
        rounded = float(np.float32(value)) if abs(value) >= SMALLEST else 0.0
        return (low <= rounded if above else low < rounded) and (rounded <= high if below else rounded < high)

    sign_low, sign_high = ">=" if above else ">", "<=" if below else "<"
    ends = [f"{sign_low} {low:g}"] * math.isfinite(low) + [f"{sign_high} {high:g}"] * math.isfinite(high)
    what = f"a number {' and '.join(ends)}".strip()
    return _or_word(default, None, allows, f"{what} in float32", flags)

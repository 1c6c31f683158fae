"""Paths that a user gives."""

import argparse
import os
from pathlib import Path

from largebatch.errors import BadSetting, UserError


def expanded(path: str | os.PathLike, name: str = "") -> str:
    """Return a path with the home folder in place of ~ or ~USER at its beginning. URLs stay as they are.

    Args:
      name: the flag or config field that gave it, for the message.
    Raises:
      BadSetting: there is no such home folder.
    """
    text = os.fspath(path)
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        home, given = text.split("/")[0], f"{name}: {text}" if name else text
        raise BadSetting(f"{given}: there is no home folder {home}; allowed: ~, ~USER, or ./{home} here") from error


def address_argument(text: str) -> str:
    """Return the path or URL that an argument of argparse is; for its `type`."""
    try:
        return expanded(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_argument(text: str) -> Path:
    """Return the path of this machine that an argument of argparse is; for its `type`."""
    return Path(address_argument(text))

"""Errors that a user can correct, and text that is safe to print."""


def printable(text: object) -> str:
    """`text` with control characters escaped: names in a file that others made must not control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class UserError(Exception):
    """A mistake that the user can correct. Its text is one line, printed without a traceback."""


class BadSetting(UserError):
    """A value that is allowed in general, but not with this data or on these devices."""

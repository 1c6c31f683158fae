"""Errors that a user can mend, and text that is safe to print."""


def printable(text: object) -> str:
    """`text` with control characters shown escaped, for a file that others made must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class UserError(Exception):
    """A mistake the user can mend: its text is one line and is printed without a traceback."""


class BadSetting(UserError):
    """A value that is allowed by itself, but not with this data or on these devices."""

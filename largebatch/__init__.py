"""What the scripts share, one idea per file."""


class UserError(Exception):
    """A mistake the user can mend: its text is one line and is printed without a traceback."""


class BadSetting(UserError):
    """A value that is allowed by itself, but not with this data or on these devices."""

"""What the scripts share, one idea per file."""


class UserError(Exception):
    """A mistake the user can mend: its text is one line and is printed without a traceback."""

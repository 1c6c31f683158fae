"""Text on the terminal: messages and tables, safe to print whatever is in them."""

import logging
import os
import sys

from rich import box, console, table, text

from largebatch.util import printable


def four_digits(value: float | None) -> str:
    """Return a number with four digits after the point, or "none"."""
    return "none" if value is None else f"{value:.4f}"


class _EscapingFormatter(logging.Formatter):
    """Formatter that escapes what would steer the terminal. A message is one line; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(record.getMessage())
        lines = [self.formatMessage(record)]
        if record.exc_info:
            lines += [printable(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def log_to_stderr() -> None:
    """Show warnings on stderr, without anything around them."""
    handler = logging.StreamHandler()
    handler.setFormatter(_EscapingFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class Console(console.Console):
    """The terminal, or a log that is not cut at 80 columns.

    A text is shown as it stands, printed or in a table: brackets are no markup, ":cat:" is no emoji, and what would
    steer the terminal is escaped. Colours are those of `rich.text.Text`. It goes quiet when nobody reads any more
    (`| head`, a `| tee` that Ctrl-C ended), where rich would exit.

    Args:
      enabled: else it is quiet.
    """

    def __init__(self, *, enabled: bool = True):
        width = None if sys.stdout.isatty() else 200
        super().__init__(quiet=not enabled, highlight=False, markup=False, emoji=False, width=width)

    def render_str(self, text: str, **options) -> text.Text:
        """Return a text as rich prints it, in lines."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print a table of texts; columns of numbers are aligned to the right."""
    out = table.Table(box=box.SIMPLE)
    for column, name in enumerate(header):
        is_numeric = all(_is_number(row[column]) for row in rows if row[column])
        justify = "right" if is_numeric else "left"
        out.add_column(printable(name), justify=justify, overflow="fold")
    for row in rows:
        out.add_row(*map(printable, row))
    Console().print(out)


def _is_number(cell: str) -> bool:
    """Return True if a cell is a decimal number, as 12, -0.5 or 1e-05."""
    return cell.replace(".", "", 1).replace("-", "").replace("e", "").isdigit()


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours, as "90 s", "15 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

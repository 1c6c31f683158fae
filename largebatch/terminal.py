"""Text on the terminal: messages, tables, safe to print whatever is in them."""

import logging
import os
import sys

from rich import box, console, table, text

from largebatch.errors import printable


def four_digits(value: float | None) -> str:
    """A number with four digits after the point, or "none"."""
    return "none" if value is None else f"{value:.4f}"


class _Escaped(logging.Formatter):
    """Messages as they are, but for characters that would steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(record.getMessage())  # one line; a traceback has its own
        text = self.formatMessage(record)
        if record.exc_info:
            text += "\n" + "\n".join(map(printable, self.formatException(record.exc_info).split("\n")))
        return text


def log_to_stderr() -> None:
    """Shows warnings on stderr, without anything around them."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Escaped("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class Console(console.Console):
    """Goes quiet when nobody reads any more (`| head`, a `| tee` that Ctrl-C ended), which rich exits at."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table of texts; numbers to the right."""
    out = table.Table(box=box.SIMPLE)
    for name, cells in zip(header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True):
        numbers = all(
            cell.replace(".", "", 1).replace("-", "").replace("e", "").isdigit() for cell in cells if cell
        )
        out.add_column(text.Text(printable(name)), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        out.add_row(*(text.Text(printable(cell)) for cell in row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(out)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )

"""Rows that benchmarks keep as JSON, and the tables of them in a page of docs/."""

import json
from pathlib import Path

from largebatch import util
from largebatch.util import UserError


def read_rows(path: Path) -> list[dict]:
    """The rows that are kept in a file; none where there is none."""
    return json.loads(path.read_text()) if path.exists() else []


def write_rows(path: Path, rows: list[dict]) -> None:
    """Keeps the rows, each in a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    _write(path, f"[\n{lines}\n]\n")


def write_part(page: Path, name: str, text: str) -> None:
    """Puts `text` between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page.

    Raises:
      UserError: the page has no such marks.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UserError(f"{page}: no place for a table: {begin} and {end} are missing")
    _write(page, f"{before}{begin}\n\n{text}\n{end}{after}")


def markdown_table(header, rows) -> str:
    """A table of cells, each a string."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    with util.replacing(path) as temporary:
        temporary.write_text(text)

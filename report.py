"""Pictures and tables of runs and studies, as one HTML page that needs nothing else.

    python report.py studies/optimizers                            writes report.html
    python report.py runs/a runs/b --out both.html --png pictures --csv rows.csv
    python report.py studies/optimizers --watch                    a page that follows a running study

Damaged and unfinished runs are named on the page. JAX is not needed.
"""

import argparse
import csv
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError, printable
from largebatch.files import replacing
from largebatch.reports import confusion, panels, sections
from largebatch.reports.panels import Group
from largebatch.runs import reader
from largebatch.studies import analysis

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """Answers wrong usage in one line."""

    def error(self, message):
        """Ends the program."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="RUN_OR_STUDY", help="run folder or study folder")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page; default %(default)s")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write every picture as a PNG too")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the leaderboard of a study, the rows of a run"
    )
    text = "show in leaderboards the updates to validation accuracies, such as 0.9,0.95"
    parser.add_argument("--updates_to", type=accuracies, default=(), metavar="ACCURACIES", help=text)
    text = "write all again every few seconds (default 5) until Ctrl-C; the page reloads itself"
    parser.add_argument("--watch", type=watch_seconds, nargs="?", const=5.0, metavar="SECONDS", help=text)
    return parser.parse_args(arguments)


def watch_seconds(text: str) -> float:
    """The argument of --watch."""
    seconds = float(text)
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} seconds; allowed: 1 to 3600")
    return seconds


def accuracies(text: str) -> tuple[float, ...]:
    """The argument of --updates_to."""
    found = tuple(map(float, text.split(",")))
    if not all(0 < accuracy <= 1 for accuracy in found):
        raise argparse.ArgumentTypeError(f"{text}; allowed: numbers above 0 and up to 1, with commas between")
    return found


def read_groups(paths: list[str]) -> list[Group]:
    """Each study by itself, and all runs outside of one together.

    Raises:
      UserError: a path is neither run nor study.
    """
    found = [reader.read(path) for path in dict.fromkeys(paths)]
    groups = [panels.group_study(item) for item in found if isinstance(item, reader.Study)]
    alone = [item for item in found if isinstance(item, reader.Run)]
    return groups + ([panels.group_runs(alone)] if alone else [])


def csv_table(groups: list[Group], updates_to: Sequence[float]) -> list[list]:
    """What --csv writes: leaderboards of studies, or rows of runs. Of several, a first column tells which.

    Raises:
      UserError: there are both studies and runs.
    """
    if len({group.study is None for group in groups}) > 1:
        raise UserError("--csv: both runs and studies are given; allowed: one kind, for their columns differ")
    if groups[0].study:
        boards = [analysis.leaderboard_rows(group.study, updates_to) for group in groups]
        lines = [
            (g.title, dict(zip(head, row, strict=True)))
            for g, (head, rows) in zip(groups, boards, strict=True)
            for row in rows
        ]
        names, several, kind = [name for head, _ in boards for name in head], len(groups) > 1, "study"
    else:
        lines = [
            (label, row) for run, label in zip(groups[0].runs, groups[0].labels, strict=True) for row in run.rows
        ]
        names, several, kind = [name for _, row in lines for name in row], len(groups[0].runs) > 1, "run"
    names = list(dict.fromkeys(names))
    rows = [[*[label] * several, *(line.get(name) for name in names)] for label, line in lines]
    return [[*[kind] * several, *names], *rows]


def write(path: Path, content: bytes, option: str) -> None:
    """Writes a whole file or none.

    Raises:
      UserError: it cannot be written.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise UserError(f"{option}: cannot write {path} ({error.strerror or error})") from error


def name_foreign(groups: list[Group], said: set[confusion.Place]) -> None:
    """Says on stderr what is read outside of a run folder because the run names it; adds it to `said`."""
    for run in (run for group in groups for run in sections.confusion_runs(group)):
        place = confusion.picture_place(run)
        if place and place not in said and not reader.lies_in(place.path, run.path):
            line = f"reads {place.field} {place.path}, which {run.path} names"
            print(printable(line), file=sys.stderr, flush=True)
            said.add(place)


def write_report(arguments: argparse.Namespace, said: set[confusion.Place]) -> str:
    """Writes everything once; returns a line that says what. For `said` see `name_foreign`."""
    groups = read_groups(arguments.paths)
    name_foreign(groups, said)
    described = [panels.describe(group) for group in groups]
    confusions = [sections.read_confusions(group) for group in groups]
    page = sections.make_page(groups, described, confusions, arguments.watch, arguments.updates_to)
    files = {arguments.out: ("--out", page.encode())}
    if arguments.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(csv_table(groups, arguments.updates_to))
        files[arguments.csv] = ("--csv", text.getvalue().encode())
    if arguments.png:
        from largebatch.reports import figures  # matplotlib takes half a second

        pictures = figures.draw_all(described)
        for index, (run, found) in enumerate(pair for pairs in confusions for pair in pairs):
            drawn = figures.draw_confusion(
                found.names, found.matrix, f"{run.path.name}: {found.accuracy:.4f} right"
            )
            pictures[f"confusion{f'-{index}' if index else ''}.png"] = drawn
        files |= {arguments.png / name: ("--png", content) for name, content in pictures.items()}
        try:
            arguments.png.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--png: cannot make the folder {arguments.png} ({error.strerror})") from error
    for path, (option, content) in files.items():
        write(path, content, option)
    found = [run.status for group in groups for run in group.runs]
    statuses = ", ".join(f"{found.count(name)} {name}" for name in dict.fromkeys(found))
    size = f"{len(files[arguments.out][1]) / 1e3:,.0f} kB"
    return f"{arguments.out}: {size}; {sections.count_runs(len(found))}{': ' * bool(found)}{statuses}"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given, said = parse(arguments), set()
    try:
        while True:
            print(printable(write_report(given, said)), flush=True)
            if not given.watch:
                return 0
            time.sleep(given.watch)
    except UserError as error:
        print(f"report.py: error: {printable(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

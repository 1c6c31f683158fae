"""Pictures and tables of runs and studies, as one HTML page that needs nothing else.

    python report.py runs/studies/optimizers                       writes report.html
    python report.py runs/a runs/b --out both.html --png pictures --csv rows.csv

Damaged and unfinished runs are named on the page. JAX is not needed.
"""

import argparse
import csv
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from largebatch.reports import charts, groups, page
from largebatch.reports.groups import Group
from largebatch.reports.page import GroupReport
from largebatch.runs import reader
from largebatch.runs.load import load
from largebatch.studies import analysis
from largebatch.util import UserError, address_argument, path_argument, printable, replacing, writing

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


# ---- command line ------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser that answers wrong usage in one line."""

    def error(self, message):
        """End the program."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", type=address_argument, metavar="RUN_OR_STUDY", help="run folder or study folder"
    )
    parser.add_argument(
        "--out", type=path_argument, default=Path("report.html"), help="the page; default %(default)s"
    )
    parser.add_argument("--png", type=path_argument, metavar="DIR", help="write every picture as a PNG too")
    parser.add_argument(
        "--csv", type=path_argument, metavar="FILE", help="write the leaderboard of a study, the rows of a run"
    )
    parser.add_argument(
        "--updates_to",
        type=accuracies,
        default=(),
        metavar="ACCURACIES",
        help="show in leaderboards the steps to validation accuracies, such as 0.9,0.95",
    )
    return parser.parse_args(arguments)


def accuracies(text: str) -> tuple[float, ...]:
    """Parse the argument of --updates_to."""
    values = tuple(map(float, text.split(",")))
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}; allowed: numbers above 0 and up to 1, with commas between")
    return values


# ---- what is read ------------------------------------------------------------------------------------


def read_groups(paths: list[str]) -> list[Group]:
    """Group each study by itself, and all runs outside of one together.

    Raises:
      UserError: a path is neither run nor study.
    """
    found, single_runs = [], []
    for path in dict.fromkeys(paths):
        content = load(path)
        if isinstance(content, reader.Study):
            found.append(groups.group_study(content))
        else:
            single_runs.append(content)
    if single_runs:
        found.append(groups.group_runs(single_runs))
    return found


# ---- what is written ---------------------------------------------------------------------------------


def csv_text(groups: list[Group], steps_to: Sequence[float]) -> str:
    """Return what --csv writes: leaderboards of studies, or rows of runs; of several, a first column tells which.

    Raises:
      UserError: there are both studies and runs.
    """
    studies = [group for group in groups if group.study]
    if studies and len(studies) < len(groups):
        raise UserError("--csv: both runs and studies are given; allowed: one kind, for their columns differ")
    columns, lines, source, sources = [], [], "study", [group.title for group in groups]
    for group in studies:
        header, rows = analysis.leaderboard_rows(group.study, steps_to)
        columns += header
        lines += [dict(zip(header, row, strict=True)) | {source: group.title} for row in rows]
    if not studies:
        source, sources = "run", groups[0].labels
        lines = [
            row | {source: label} for run, label in zip(groups[0].runs, sources, strict=True) for row in run.rows
        ]
        columns = [name for run in groups[0].runs for row in run.rows for name in row]
    columns = dict.fromkeys([source, *columns] if len(sources) > 1 else columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def draw_pngs(reports: list[GroupReport]) -> dict[str, bytes]:
    """Return every chart of the page as {file name: PNG}; those of further groups have their number before it."""
    pictures = {}
    for index, report in enumerate(reports):
        axes, runs = charts.axes_of(report.group), page.runs_of(report.group)
        ids = {chart.id for chart in report.charts}
        for chart in report.charts:
            short = chart.id.removeprefix("curve-")  # a column may be called as another chart is
            name = re.sub(r"[^\w.-]+", "_", chart.id if short in ids else short)
            pictures[f"{index}-{name}.png" if index else f"{name}.png"] = charts.png_of(chart, axes, runs)
    return pictures


def write_report(arguments: argparse.Namespace) -> str:
    """Read and draw everything, then write it; return a line that says what."""
    found = read_groups(arguments.paths)
    reports = page.report_groups(found, arguments.updates_to)
    html = page.make_page(reports).encode()
    files = [("--out", arguments.out, html)]
    if arguments.csv:
        files.append(("--csv", arguments.csv, csv_text(found, arguments.updates_to).encode()))
    if arguments.png:
        files += [("--png", arguments.png / name, content) for name, content in draw_pngs(reports).items()]
        with writing(arguments.png, "--png"):
            arguments.png.mkdir(parents=True, exist_ok=True)
    for option, path, content in files:
        with writing(path, option), replacing(path) as temporary:
            temporary.write_bytes(content)
    statuses = [run.status for group in found for run in group.runs]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    runs = f"{len(statuses)} run{'s' * (len(statuses) != 1)}{': ' * bool(counts)}{counts}"
    return f"{arguments.out}: {len(html) / 1e3:,.0f} kB; {runs}"


def main(arguments: list[str] | None = None) -> int:
    """Write the report; return the exit code."""
    try:
        print(printable(write_report(parse(arguments))))
        return 0
    except UserError as error:
        print(f"report.py: error: {printable(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

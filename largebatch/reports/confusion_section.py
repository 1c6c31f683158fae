"""What runs took for what, as HTML: matrix or recalls, and the worst mistakes with their pictures."""

import math
from dataclasses import dataclass

from largebatch.predictions import files as prediction_files
from largebatch.reports import confusion
from largebatch.reports.best_runs import MAX_RUNS, best_runs
from largebatch.reports.confusion import Confusion, Example, Mistake
from largebatch.reports.labels import NOTHING, number_cell
from largebatch.reports.markup import Html, element, join, table
from largebatch.reports.panels import Group
from largebatch.runs.reader import Run

MAX_CLASSES = 50  # of a matrix on the page
MAX_SHORT_NAME = 3  # letters of a class name that need no turned heading


@dataclass(frozen=True)
class RunConfusion:
    """A run and its confusion."""

    run: Run
    confusion: Confusion


def read_confusions(group: Group) -> list[RunConfusion]:
    """The confusions to show; damaged predictions are added to the problems of their run."""
    confusions = []
    for run in best_runs(group, prediction_files.exist):
        try:
            confusions.append(RunConfusion(run, confusion.read_confusion(run)))
        except prediction_files.DamagedPredictions as damage:
            run.problems.append(str(damage))
    return confusions


def confusion_cards(group: Group, confusions: list[RunConfusion], key: str) -> Html:
    """Matrix or recalls, and the worst mistakes, of each."""
    cards = []
    if not group.study and len(group.runs) > MAX_RUNS:
        cards.append(element("p", f"Of the {MAX_RUNS} most accurate runs.", cls="soft"))
    for of_run in confusions:
        run, shown = of_run.run, of_run.confusion
        label = group.labels[group.runs.index(run)]
        heading = (
            f"{label}: {shown.accuracy:.4f} right of {shown.matrix.sum():,} validation examples, at the best step"
        )
        if len(shown.names) <= MAX_CLASSES:
            counts = matrix(shown)
        else:
            counts = recall_table(shown, f"{key}-{run.path.name}-recall")
        beside = element("div", *mistakes(shown))
        both = element("div", element("div", counts, cls="scroll"), beside, cls="both")
        cards.append(element("div", element("h3", heading), both, cls="card"))
    return join(cards)


# ---- matrix and recalls ------------------------------------------------------------------------------


def matrix(shown: Confusion) -> Html:
    """Counts, shaded by their share of the true class, and the recall."""
    turned = "up" if max(map(len, shown.names)) > MAX_SHORT_NAME else "num"
    heads = [element("th", "true ↓  predicted →")]
    heads += [element("th", element("span", name), cls=turned, scope="col") for name in shown.names]
    heads.append(element("th", "recall", cls="num"))
    rows = [_matrix_row(shown, true) for true in range(len(shown.names))]
    return element("table", element("thead", element("tr", *heads)), element("tbody", *rows), cls="confusion")


def _matrix_row(shown: Confusion, true: int) -> Html:
    name, counts = shown.names[true], shown.matrix[true].tolist()
    cells = [element("th", name, scope="row")]
    for predicted, count in enumerate(counts):
        right = true == predicted
        css_class = "right" if right else "zero" if not count else None
        shade = f"--v: {darkness(count, sum(counts), right):.3f}"
        title = f"{count} of {name} taken for {shown.names[predicted]}"
        cells.append(element("td", f"{count:,}", cls=css_class, style=shade, title=title))
    recall = shown.recall[true]
    cells.append(element("td", NOTHING if math.isnan(recall) else f"{recall:.1%}", cls="recall"))
    return element("tr", *cells)


def darkness(count: int, total: int, right: bool) -> float:
    """How dark a count is, 0..1: by its share of the class, mistakes by the root of it, for they are few."""
    share = count / max(total, 1)
    return share if right else math.sqrt(share)


def recall_table(shown: Confusion, key: str) -> Html:
    """Recall of each class, where a matrix would be too large."""
    rows = []
    for name, count, recall in zip(shown.names, shown.matrix.sum(1), shown.recall.tolist(), strict=True):
        rows.append([name, number_cell(int(count)), number_cell(None if math.isnan(recall) else recall, ".1%")])
    return table(["class", "examples", "recall"], rows, cls="sortable", id=key)


# ---- mistakes ----------------------------------------------------------------------------------------


def mistakes(shown: Confusion) -> list[Html]:
    """The worst confusions with their pictures, or why there are none."""
    if not shown.worst:
        return [element("p", "No mistakes.")]
    pieces = [element("div", *(_mistake(shown.names, mistake) for mistake in shown.worst), cls="mistakes")]
    if shown.no_pictures:
        pieces.append(element("p", f"No example pictures: {shown.no_pictures}.", cls="soft"))
    return pieces


def _mistake(names: list[str], mistake: Mistake) -> Html:
    title = f"{names[mistake.true]} taken for {names[mistake.predicted]}: {mistake.count:,}"
    pictures = [_picture(example) for example in mistake.examples if example.picture]
    return element("div", element("h4", title), element("div", *pictures, cls="pictures"))


def _picture(example: Example) -> Html:
    """One mistake, and how sure the network was of it."""
    name = example.example_id
    image = element("img", src=example.picture, alt=name, title=name, width=64, height=64)
    return element("figure", image, element("figcaption", f"{example.probability:.0%} sure"))

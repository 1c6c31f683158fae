"""The worst and best predictions of maps, as HTML: image, truth, prediction and error side by side."""

import base64
import io
from dataclasses import dataclass

import numpy as np

from largebatch.data.pictures import class_colours, picture_of, shaded
from largebatch.predictions import cases as case_files
from largebatch.predictions.cases import Cases
from largebatch.reports.best_runs import best_runs
from largebatch.reports.markup import Html, element, join
from largebatch.reports.panels import Group
from largebatch.runs.reader import Run
from largebatch.tasks import planes

WRONG = np.uint8([230, 60, 60])
MAX_LEGEND = 12  # classes that are named
MAX_SIDE = 192  # pixels of a picture; larger maps are thinned


@dataclass(frozen=True)
class Picture:
    """A picture of a case, and the column in which it is."""

    column: str
    pixels: np.ndarray  # uint8 [H, W, 3]


@dataclass(frozen=True)
class RunCases:
    """A run and its cases."""

    run: Run
    cases: Cases


def read_cases(group: Group) -> list[RunCases]:
    """The cases to show; a damaged file is added to the problems of its run."""
    found = []
    for run in best_runs(group, case_files.exist):
        try:
            found.append(RunCases(run, case_files.read(run.path)))
        except case_files.DamagedCases as damage:
            run.problems.append(str(damage))
    return found


def case_cards(group: Group, found: list[RunCases]) -> Html:
    """A table of pictures for each run."""
    cards = []
    for of_run in found:
        label = group.labels[group.runs.index(of_run.run)]
        heading = f"{label}: validation images with the highest and the lowest losses, at the best step"
        parts = [element("h3", heading), _legend(of_run.cases), _table(of_run.cases)]
        cards.append(element("div", *parts, cls="card"))
    return join(cards)


def _legend(cases: Cases) -> Html:
    """The colour of each class, of the first ones if there are many."""
    names = []
    for number, name in enumerate(cases.classes[:MAX_LEGEND]):
        red, green, blue = class_colours(np.array([[number]]))[0, 0]
        swatch = element("span", cls="swatch", style=f"--c: rgb({red}, {green}, {blue})")
        names.append(element("span", swatch, str(name), cls="soft"))
    return element("p", *names)


def _table(cases: Cases) -> Html:
    rows = []
    for number, example_id in enumerate(cases.ids):
        scores = (
            f"{name.replace('_', ' ')} {score:.3f}"
            for name, score in zip(cases.columns, cases.scores[number], strict=True)
        )
        words = element("th", str(example_id), element("br"), *_lines(scores), scope="row")
        pictures = pictures_of(cases, number)
        cells = [
            element("td", element("img", src=_uri(picture.pixels), alt=f"{picture.column} of {example_id}"))
            for picture in pictures
        ]
        rows.append(element("tr", words, *cells))
    heads = [element("th", name, scope="col") for name in ("", *(picture.column for picture in pictures))]
    inside = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), cls="cases")
    return element("div", inside, cls="scroll")


def _lines(texts) -> list[Html]:
    return [piece for text in texts for piece in (element("span", text, cls="soft"), element("br"))]


def pictures_of(cases: Cases, number: int) -> list[Picture]:
    """The image of a case; then truth, prediction and error of what was to be predicted."""
    image, truth, predicted = cases.images[number], cases.truth[number], cases.predicted[number]
    pictures = [Picture("image", picture_of(image))]
    if cases.targets.classes:
        pictures += _mask_pictures(pictures[0].pixels, planes.classes_of(truth), planes.classes_of(predicted))
    if cases.targets.has_depth:
        pictures += _depth_pictures(planes.depths_of(truth), planes.depths_of(predicted))
    return pictures


def _mask_pictures(image: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> list[Picture]:
    wrong = np.where((truth != predicted)[..., None], WRONG, image // 3)
    return [
        Picture("mask", class_colours(truth)),
        Picture("predicted", class_colours(predicted)),
        Picture("wrong", wrong.astype(np.uint8)),
    ]


def _depth_pictures(truth: np.ndarray, predicted: np.ndarray) -> list[Picture]:
    """All on the scale of the true depths."""
    low, high = float(truth.min()), float(truth.max())
    span = max(high - low, 1 / planes.LARGEST_DEPTH)
    return [
        Picture("depth", shaded((truth - low) / span)),
        Picture("predicted", shaded((predicted - low) / span)),
        Picture("error", shaded(np.abs(predicted - truth) / span)),
    ]


def _uri(pixels: np.ndarray) -> str:
    """A PNG as a data: URI."""
    from PIL import Image

    step = -(-max(pixels.shape[:2]) // MAX_SIDE)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[::step, ::step])).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

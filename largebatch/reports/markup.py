"""HTML in which nothing that came from a file can become a tag, and the page around it."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent
WITHOUT_END_TAG = {"img", "br", "meta"}


class Html(str):
    """Text that is markup already; every other str is escaped."""

    __slots__ = ()


def element(name: str, *content, **attributes) -> Html:
    """One element: element("p", "1 < 2", cls="soft") is <p class="soft">1 &lt; 2</p>.

    Attributes that are None are left out; `cls` is class, and data_v is data-v. None among the content is left out.
    """
    start = name
    for key, value in attributes.items():
        if value is not None:
            attribute = "class" if key == "cls" else key.replace("_", "-")
            start += f' {attribute}="{html.escape(str(value))}"'
    if name in WITHOUT_END_TAG:
        return Html(f"<{start}>")
    return Html(f"<{start}>{join(content)}</{name}>")


def join(content: Iterable) -> Html:
    """Several pieces, one after the other; None is left out."""
    pieces = (piece for piece in content if piece is not None)
    return Html("".join(piece if isinstance(piece, Html) else html.escape(str(piece)) for piece in pieces))


@dataclass(frozen=True)
class Cell:
    """A table cell. `sort_by` is what its column is sorted by; None is its text."""

    content: object
    sort_by: object = None
    css_class: str | None = None


def table(
    header: list[str], rows: Iterable[list], *, row_attributes: Iterable[dict] | None = None, **attributes
) -> Html:
    """A table in a box that scrolls sideways.

    Args:
      rows: cells by row, each a Cell or a text. A column is aligned as the first of its cells that has a class.
      row_attributes: attributes of each row's element.
      attributes: those of the table's.
    """
    rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    row_attributes = row_attributes or [{} for _ in rows]
    body, classes = [], [None] * len(header)
    for cells, of_row in zip(rows, row_attributes, strict=True):
        classes = [known or cell.css_class for known, cell in zip(classes, cells, strict=True)]
        inside = (element("td", cell.content, data_v=cell.sort_by, cls=cell.css_class) for cell in cells)
        body.append(element("tr", *inside, **of_row))
    heads = []
    for name, css_class in zip(header, classes, strict=True):
        heads.append(element("th", name, cls="num" if css_class == "num" else None, scope="col"))
    inside = element("table", element("thead", element("tr", *heads)), element("tbody", *body), **attributes)
    return element("div", element("div", inside, cls="scroll tall"), cls="card")


def document(title: str, body: Html, data) -> str:
    """The whole page, with style, script and data inside; its policy lets the browser load nothing else.

    Args:
      data: what page.js draws from; plain JSON.
    """
    script = (ASSETS / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "title": html.escape(title),
        "style": (ASSETS / "style.css").read_text(),
        "script": script,
        "script_sha256": f"sha256-{digest}",
        "body": body,
        # Inside <script> only "<" could end it; JSON may write it as an escape.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (ASSETS / "template.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)

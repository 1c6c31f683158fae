"""HTML in which nothing that came from a file can become a tag, and the page around it."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ASSETS = Path(__file__).parent
EMPTY = {"img", "br"}


class Html(str):
    """Text that is markup already; every other str is escaped."""

    __slots__ = ()


def element(name: str, *content, **attributes) -> Html:
    """One element: element("p", "1 < 2", cls="soft") is <p class="soft">1 &lt; 2</p>.

    Attributes that are None are left out; `cls` is class, and data_v is data-v. None among the content is left out.
    """
    names = {"cls": "class"}
    given = {names.get(key, key.replace("_", "-")): value for key, value in attributes.items() if value is not None}
    inside = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    return Html(f"<{name}{inside}>" + ("" if name in EMPTY else f"{join(content)}</{name}>"))


def join(content: Iterable) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(p if isinstance(p, Html) else html.escape(str(p)) for p in content if p is not None))


class Cell(NamedTuple):
    """A table cell: what is shown, what it is sorted by (None: the text itself), and its class."""

    content: object
    key: object = None
    cls: str | None = None


def table(header: list[str], rows: Iterable[tuple[dict, list]], **attributes) -> Html:
    """A table in a box that scrolls sideways; rows are (attributes of the row, cells), a cell a Cell or a text."""
    body, classes = [], [None] * len(header)
    for row, cells in rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
        classes = [cls or cell.cls for cls, cell in zip(classes, cells, strict=True)]
        body.append(element("tr", *(element("td", c.content, data_v=c.key, cls=c.cls) for c in cells), **row))
    heads = (
        element("th", name, cls="num" if cls == "num" else None, scope="col")
        for name, cls in zip(header, classes, strict=True)
    )
    inside = element("table", element("thead", element("tr", *heads)), element("tbody", *body), **attributes)
    return element("div", element("div", inside, cls="scroll tall"), cls="card")


def page(title: str, body: Html, data, refresh_sec: float | None = None) -> str:
    """The whole document, with style, script and data inside; its policy lets the browser load nothing else."""
    script = (ASSETS / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    refresh = (
        element("meta", http_equiv="refresh", content=f"{refresh_sec:g}").removesuffix("</meta>")
        if refresh_sec
        else ""
    )
    values = {
        "title": html.escape(title),
        "style": (ASSETS / "style.css").read_text(),
        "script": script,
        "script_sha256": f"sha256-{digest}",
        "refresh": refresh,
        "body": body,
        # Inside <script> only "<" could end it; JSON may write it as an escape.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (ASSETS / "template.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)

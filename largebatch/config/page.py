"""Write docs/config.md, which documents every field of a config: python -m largebatch.config.page"""

import ast
import inspect
from pathlib import Path

from largebatch.config import fields
from largebatch.config.dicts import FIELDS, RULES, SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
OPENING = """# Every field of a config

Made from `largebatch/config/fields.py` by `largebatch/config/page.py`. A file of `configs/` changes some of
them: `c.optimizer.name = "sgd"`; so does the command line: `--config.optimizer.name sgd`. A step is a step of the
optimizer. Images are the training images as they are, examples all of their views. Fields with * may change when a
run is resumed.
"""


def help_texts() -> dict[str, str]:
    """Return the text below each field in the source of `fields`, in one line, by the field's name."""
    sections = {section.__name__: f"{name}." for name, section in SECTIONS.items()} | {"Config": ""}
    texts = {}
    for statement in ast.parse(inspect.getsource(fields)).body:
        if not isinstance(statement, ast.ClassDef):
            continue
        for line, below in zip(statement.body, statement.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[sections[statement.name] + line.target.id] = " ".join(below.value.value.split())
    return texts


def page() -> str:
    """Return the text of docs/config.md."""
    texts, lines = help_texts(), [OPENING]
    for section in (*SECTIONS, ""):
        if section:
            lines += [f"## {section}", "", SECTIONS[section].__doc__, ""]
        else:
            lines += ["## Without a section", ""]
        lines += ["| field | default | allowed | |", "|---|---|---|---|"]
        for name in FIELDS:
            if name.rpartition(".")[0] == section:
                cells = f"`{name}`{'' if RULES[name].identity else ' *'}", f"`{FIELDS[name].default!r}`"
                allowed = RULES[name].text.replace(" | ", ", ").replace("|", "\\|")
                lines.append(f"| {' | '.join(cells)} | {allowed} | {texts[name].replace(' | ', ', ')} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

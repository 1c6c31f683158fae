"""Below build.py nothing has a whole config: each part gets its section or plain values."""

import ast
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import train
from build import ProgramCache
from largebatch.config.fields import Config

# config/ makes it, cli.py starts scripts with it, and a study's space file derives one config from another.
ABOVE = ("config/", "studies/", "cli.py")
WHOLE = {"Config", "ConfigDict"}
BELOW = sorted(
    path
    for path in (ROOT / "largebatch").rglob("*.py")
    if not path.relative_to(ROOT / "largebatch").as_posix().startswith(ABOVE)
)


def names_in(node: ast.AST) -> set[str]:
    """The names in an annotation, those within a string too."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            names |= names_in(ast.parse(part.value))
        names.add(getattr(part, "id", getattr(part, "attr", None)))
    return names


@pytest.mark.parametrize("path", BELOW, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_annotation_is_a_whole_config(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                assert not names_in(getattr(node, field)) & WHOLE, f"line {node.lineno}"


def test_no_call_of_a_run_is_given_a_whole_config(small_config, tmp_path):
    below, given = {str(path) for path in BELOW}, set()

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename in below:
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            for name in arguments:
                value = frame.f_locals.get(name)
                if isinstance(value, Config) or type(value).__name__ == "ConfigDict":
                    given.add(f"{code.co_qualname}({name})" if hasattr(code, "co_qualname") else code.co_name)

    small_config.train.inner_steps, small_config.train.outer_steps = 3, 1
    sys.setprofile(look)
    try:
        train.train_and_evaluate(small_config, str(tmp_path), shared=ProgramCache())
    finally:
        sys.setprofile(None)
    assert not given

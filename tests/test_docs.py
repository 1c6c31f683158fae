"""The pages name nothing that is not there: links, paths, commands, flags, fields, values and make targets."""

import ast
import functools
import re
import runpy
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, run_script, typed
from test_commands import lines_of
from test_imports import MAY_IMPORT

import bench
from configs import default
from largebatch.config.dicts import RULES

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
CONFIGS = sorted(ROOT.glob("configs/**/*.py"))  # whose docstrings hold commands
TAKE_A_CONFIG = ("train.py", "augment.py", "sweep.py")
SCRIPTS = (
    *TAKE_A_CONFIG,
    "evaluate.py",
    "export.py",
    "report.py",
    "bench.py",
    "minimal.py",
    "-m largebatch.pod",
)
FIELD_GROUPS = {field.split(".")[0] for field in RULES if "." in field}
# What a command says of a trace is checked by name only, for its file is not there.
TRACE_FIELDS = ("batch.trace", "batch.per_device_batch_size", "batch.time_per_update", "batch.hold_last")


# ---- reading a page ---------------------------------------------------------------------------------


def prose_of(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans_of(path: Path) -> list[str]:
    """What stands between backticks outside of blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(path))]


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_placeholder(word: str) -> bool:
    """ "R", "NAME", "configs/NAME", "...": what a reader is to fill in."""
    return "..." in word or re.fullmatch(r"(?:.*/)?[A-Z][A-Z_:]*", word) is not None


def scripts_of(words: list[str]) -> list[tuple[str, list[str]]]:
    """(script, arguments) of a command line, and of the one that it starts after "--".

    A script is one of SCRIPTS, "make" or "pip". Lines of other programs have none.
    """
    if "launch/slurm.sbatch" in words:
        words = ["python", "train.py", *words[words.index("launch/slurm.sbatch") + 1 :]]
    if words and words[0] in ("make", "pip"):
        return [(words[0], words[1:])]
    if "python" not in words:
        return []
    words = words[words.index("python") + 1 :]
    script, arguments = (" ".join(words[:2]), words[2:]) if words[0] == "-m" else (words[0], words[1:])
    if "--" not in arguments:
        return [(script, arguments)]
    cut = arguments.index("--")
    theirs = arguments[cut + 1 :]
    if script == "bench.py":  # hands what follows to train.py
        theirs = ["python", "train.py", *theirs]
    return [(script, arguments[:cut]), *scripts_of(theirs)]


@functools.cache
def all_commands() -> list[tuple[str, str, list[str]]]:
    """(page and line, script, arguments) of every command of the pages and of docstrings of configs."""
    lines = [(path.name, line) for path in [*PAGES, *CONFIGS] for line in lines_of(path)]
    return [
        (f"{page}: {line}", script, arguments)
        for page, line in lines
        for script, arguments in scripts_of(shlex.split(line, comments=True))
    ]


# ---- links and names --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors_of(page), f"{path.name}: {target}"


def test_every_page_is_linked_from_the_readme():
    links = re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text())
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} == set(links)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_and_fields_that_are_named_exist(path):
    folders = ("benchmarks", "configs", "docs", "largebatch", "launch", "tests")
    names = {file.name for folder in folders for file in (ROOT / folder).rglob("*.*")}
    names |= {file.name for file in ROOT.glob("*.*")}
    for span in spans_of(path):
        word = span.split()[0]
        if word.split("/")[0] in folders and "/" in word:
            assert (ROOT / word).exists() or is_placeholder(word.removesuffix(".py")), f"{path.name}: {word}"
        elif re.fullmatch(r"\w+\.(py|md|js)", word):
            assert word in names, f"{path.name}: {word}"
        elif word.split(".")[0] in FIELD_GROUPS and re.fullmatch(r"\w+\.(?!json|safetensors|stablehlo)\w+", word):
            assert word in RULES, f"{path.name}: no field {word}"


def test_the_table_of_imports_is_the_one_that_is_tested():
    layout = (ROOT / "docs/architecture.md").read_text().split("## Layout")[1].split("**The import rule.**")[0]
    rows = re.findall(r"^\| (`[\w/].*?) \| .*? \| (.*?) ?\|$", layout, re.M)
    table = {
        package.removesuffix(".py").removesuffix("/"): set(re.findall(r"`([\w.]+)`", allowed))
        for packages, allowed in rows
        for package in re.findall(r"`([\w./]+)`", packages)
    }
    assert table == MAY_IMPORT


# ---- commands ---------------------------------------------------------------------------------------


def test_make_targets_and_requirements_exist_and_every_script_has_a_command():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for where, script, arguments in all_commands():
        assert script != "make" or arguments[0] in targets, where
        assert script != "pip" or (ROOT / arguments[arguments.index("-r") + 1]).exists(), where
    assert {script for _, script, _ in all_commands()} == {*SCRIPTS, "make", "pip"}


@functools.cache
def flags_of(script: str) -> dict[str, list[str]]:
    """The flags of a script, each with its values where they are listed."""
    result = run_script(*script.split(), "--help")
    assert result.returncode == 0, result.stderr
    flags = {}
    for switch, name in re.findall(r"^\s+--(\[no\])?([\w.-]+)", result.stdout, re.MULTILINE):
        flags |= {name: [], f"no{name}": []} if switch else {name: []}
    values = dict(re.findall(r"^\s+--([\w.-]+):\s+<([^>]+)>", result.stdout, re.MULTILINE))
    return flags | {name: found.split("|") for name, found in values.items()}


def given_flags(arguments: list[str]) -> list[tuple[str, str]]:
    """(flag, value) of a command line, "" where there is no value."""
    found = []
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            found.append((name, value or ("" if following.startswith("--") else following)))
    return found


def literal(value: str) -> object:
    try:
        return ast.literal_eval(value or "True")
    except (ValueError, SyntaxError):
        return value


def check_config(where: str, given: list[tuple[str, str]]) -> None:
    """Fields exist, files are there, and the config as a whole is allowed."""
    file = dict(given).get("config", "")
    config = default.get_config()
    if file and not is_placeholder(file):
        config = runpy.run_path(str(ROOT / file))["get_config"]()
    overrides = {}
    for name, value in given:
        field = name.removeprefix("config.")
        if field != name:
            assert field in RULES, f"unknown field in {where}"
            if field not in TRACE_FIELDS and not is_placeholder(value):
                overrides[field] = literal(value)
    with config.ignore_type():
        config.update_from_flattened_dict(overrides)
    if not any(field.startswith("devices.") for field in overrides):  # whose address a reader fills in
        typed(config)


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_and_fields_of_commands_exist(script):
    flags = flags_of(script)
    for where, its_script, arguments in all_commands():
        if its_script != script:
            continue
        given = given_flags(arguments)
        if script in TAKE_A_CONFIG:
            check_config(where, given)
            given = [(name, value) for name, value in given if name.split(".")[0] != "config"]
        for name, value in given:
            assert name in flags, f"--{name} in {where}"
            assert not flags[name] or value in flags[name], f"--{name} {value} in {where}"
            assert name != "space" or is_placeholder(value) or (ROOT / value).exists(), where
        assert script != "bench.py" or arguments[0] in bench.COMMANDS, where


def test_flags_between_backticks_exist():
    """Flags that stand alone in a sentence belong to some script."""
    known = {"config", *(f"config.{field}" for field in RULES)}
    known |= {name for script in SCRIPTS for name in flags_of(script)}
    for path in PAGES:
        for span in spans_of(path):
            if span.startswith("--"):
                assert {name for name, _ in given_flags(shlex.split(span))} <= known, f"{path.name}: {span}"

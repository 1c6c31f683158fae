"""The pages name nothing that is not there: links, paths, commands, flags, fields, values and make targets."""

import ast
import dataclasses
import functools
import re
import runpy
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, run_script, typed
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
LAUNCHERS = ("srun", "mpirun")
FIELD_GROUPS = {field.split(".")[0] for field in RULES if "." in field}
# What a command says of a trace is checked by name only, for its file is not there.
TRACE_FIELDS = ("batch.trace", "batch.per_device_batch_size", "batch.time_per_update", "batch.hold_last")


# ---- reading a page ---------------------------------------------------------------------------------


def blocks_of(text: str) -> list[str]:
    """The fenced blocks that hold commands: those without a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for language, block in blocks if not language]


def prose_of(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans_of(text: str) -> list[str]:
    """What stands between backticks outside of blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(text))]


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_placeholder(word: str) -> bool:
    """ "R", "NAME", "configs/NAME", "...": what a reader is to fill in."""
    return "..." in word or re.fullmatch(r"(?:.*/)?[A-Z][A-Z_:]*", word) is not None


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page; `script` is one of SCRIPTS, "make" or "pip"."""

    page: str
    text: str
    script: str
    arguments: tuple[str, ...]


def from_launcher(words: list[str]) -> list[str]:
    """What the files of launch/ start: theirs is a command line of train.py."""
    if words and words[0] == "sbatch" and "launch/slurm.sbatch" in words:
        return ["python", "train.py", *words[words.index("launch/slurm.sbatch") + 1 :]]
    if words and words[0] == "launch/tpu_vm.sh" and "python" in words:
        return words[words.index("python") :]
    return [] if words and words[0] in ("export", "launch/tpu_vm.sh") else words


def parse(page: str, text: str) -> list[Command]:
    """The command in a line, and the one that it starts after "--"; none in a line that is only a comment.

    Raises:
      ValueError: the line is no command that these tests know.
    """
    words = from_launcher(shlex.split(text, comments=True))
    if words and words[0] in LAUNCHERS:
        words = words[words.index("python") :]
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or words[0] == ".":
        return []
    program, rest = words[0], words[1:]
    if program in ("make", "pip"):
        return [Command(page, text, program, tuple(rest))]
    if program != "python" or not rest:
        raise ValueError(f"{page}: not a command: {text}")
    script = " ".join(rest[:2]) if rest[0] == "-m" else rest[0]
    rest = rest[2:] if rest[0] == "-m" else rest[1:]
    if "--" not in rest:
        return [Command(page, text, script, tuple(rest))]
    cut = rest.index("--")
    ours, theirs = rest[:cut], rest[cut + 1 :]
    if script == "bench.py":  # hands what follows to train.py
        theirs = ["python", "train.py", *theirs]
    return [Command(page, text, script, tuple(ours)), *parse(page, shlex.join(theirs))]


def commands_of(path: Path) -> list[Command]:
    """Every command of a page, in blocks and between backticks; of a Python file, those in its docstring."""
    text = path.read_text()
    if path.suffix == ".py":
        lines = ast.get_docstring(ast.parse(text)).replace("\\\n", " ").splitlines()
        lines = [line for line in lines if re.match(r" *(\w+=\S+ )?python ", line)]
    else:
        lines = [line for block in blocks_of(text) for line in block.replace("\\\n", " ").splitlines()]
        lines += [span for span in spans_of(text) if re.match(r"(python|make|pip|srun|mpirun) ", span)]
    return [command for line in lines for command in parse(path.name, line)]


@functools.cache
def all_commands() -> list[Command]:
    return [command for path in [*PAGES, *CONFIGS] for command in commands_of(path)]


# ---- links and names --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors_of(page.read_text()), f"{path.name}: {target}"


def test_every_page_is_linked_from_the_readme():
    links = re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text())
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} == set(links)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_and_fields_that_are_named_exist(path):
    folders = ("benchmarks", "configs", "docs", "largebatch", "launch", "tests")
    names = {file.name for folder in folders for file in (ROOT / folder).rglob("*.*")}
    names |= {file.name for file in ROOT.glob("*.*")}
    for span in spans_of(path.read_text()):
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


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in all_commands():
        if command.script == "make":
            assert command.arguments[0] in targets, f"{command.page}: {command.text}"


def test_requirements_that_are_installed_exist():
    for command in all_commands():
        if command.script == "pip":
            file = command.arguments[command.arguments.index("-r") + 1]
            assert (ROOT / file).exists(), f"{command.page}: {command.text}"


def test_every_command_is_checked():
    assert {command.script for command in all_commands()} == {*SCRIPTS, "make", "pip"}


@functools.cache
def help_of(script: str) -> str:
    result = run_script(*script.split(), "--help")
    assert result.returncode == 0, result.stderr
    return result.stdout


def flags_of(script: str) -> dict[str, list[str]]:
    """The flags of a script, each with its values where they are listed."""
    text = help_of(script)
    flags = {}
    for switch, name in re.findall(r"^\s+--(\[no\])?([\w.-]+)", text, re.MULTILINE):
        flags |= {name: [], f"no{name}": []} if switch else {name: []}
    values = dict(re.findall(r"^\s+--([\w.-]+):\s+<([^>]+)>", text, re.MULTILINE))
    return flags | {name: found.split("|") for name, found in values.items()}


def given_flags(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """(flag, value) of a command line, "" where there is no value."""
    found = []
    for index, word in enumerate(arguments):
        if not word.startswith("--"):
            continue
        name, _, value = word.removeprefix("--").partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        found.append((name, value or ("" if following.startswith("--") else following)))
    return found


def literal(value: str) -> object:
    if not value:
        return True
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def check_config(command: Command, given: list[tuple[str, str]]) -> None:
    """Fields exist, files are there, and the config as a whole is allowed."""
    file = dict(given).get("config", "")
    config = default.get_config()
    if file and not is_placeholder(file):
        config = runpy.run_path(str(ROOT / file))["get_config"]()
    overrides = {}
    for name, value in given:
        field = name.removeprefix("config.")
        if field != name:
            assert field in RULES, f"{command.page}: unknown field in {command.text}"
            if field not in TRACE_FIELDS and not is_placeholder(value):
                overrides[field] = literal(value)
    with config.ignore_type():
        config.update_from_flattened_dict(overrides)
    if not any(field.startswith("devices.") for field in overrides):  # whose address a reader fills in
        typed(config)


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_and_fields_of_commands_exist(script):
    commands = [command for command in all_commands() if command.script == script]
    flags = flags_of(script)
    for command in commands:
        where = f"{command.page}: {command.text}"
        given = given_flags(command.arguments)
        if script in TAKE_A_CONFIG:
            check_config(command, given)
            given = [(name, value) for name, value in given if name.split(".")[0] != "config"]
        for name, value in given:
            assert name in flags, f"--{name} in {where}"
            assert not flags[name] or value in flags[name], f"--{name} {value} in {where}"
            if name == "space" and not is_placeholder(value):
                assert (ROOT / value).exists(), where
        if script == "bench.py":
            assert command.arguments[0] in bench.COMMANDS, where


def test_flags_between_backticks_exist():
    """Flags that stand alone in a sentence belong to some script."""
    known = {"config", *(f"config.{field}" for field in RULES)}
    known |= {name for script in SCRIPTS for name in flags_of(script)}
    for path in PAGES:
        for span in spans_of(path.read_text()):
            if span.startswith("--"):
                assert {name for name, _ in given_flags(tuple(shlex.split(span)))} <= known, f"{path.name}: {span}"

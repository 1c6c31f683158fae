"""The pages name nothing that is not there: links, paths, commands, flags, fields, values and make targets."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from test_commands import lines_of
from test_imports import MAY_IMPORT

import bench
import model as models
from largebatch.config.dicts import RULES
from largebatch.optim.optimizers import OPTIMIZERS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
CONFIGS = sorted(ROOT.glob("configs/**/*.py"))  # whose docstrings hold commands
SCRIPTS = [*ROOT.glob("*.py"), ROOT / "largebatch" / "pod.py"]
FLAG = r"(DEFINE_bool|DEFINE_\w+|path_flag|whole_numbers|add_argument)\(\s*\"(?:--)?(\w+)\""
FIELD_GROUPS = {field.split(".")[0] for field in RULES if "." in field}


# ---- reading a page ---------------------------------------------------------------------------------


def prose_of(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans_of(path: Path) -> list[str]:
    """Return what stands between backticks outside of blocks, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(path))]


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_placeholder(word: str) -> bool:
    """ "R", "NAME", "configs/NAME", "...": what a reader is to fill in."""
    return "..." in word or re.fullmatch(r"(?:.*/)?[A-Z][A-Z_:]*", word) is not None


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


# ---- commands; tests/test_commands.py runs them ------------------------------------------------------------


def test_make_targets_requirements_and_benchmarks_that_are_named_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in PAGES:
        for line in [*lines_of(path), *spans_of(path)]:
            make, bench_name = re.match(r"make ([\w-]+)", line), re.search(r"bench\.py (\w+)", line)
            assert make is None or make[1] in targets, f"{path.name}: {line}"
            assert bench_name is None or bench_name[1] in bench.COMMANDS, f"{path.name}: {line}"
            for file in re.findall(r"pip install .*?-r (\S+)", line):
                assert (ROOT / file).exists(), f"{path.name}: {line}"


def test_flags_and_config_fields_of_all_commands_and_sentences_exist():
    known = {"config", "help", *(f"config.{field}" for field in RULES)}
    for script in SCRIPTS:
        for kind, name in re.findall(FLAG, script.read_text()):
            known |= {name, f"no{name}"} if kind == "DEFINE_bool" else {name}
    for path in [*PAGES, *CONFIGS]:
        lines = lines_of(path) if path.suffix == ".py" else [*lines_of(path), *spans_of(path)]
        for line in lines:
            if re.match(r"--|.*\bpython |.*launch/slurm", line):
                ours = re.split(r"launch/slurm\.sbatch|(?=\bpython )", line, maxsplit=1)[-1]
                named = set(re.findall(r"(?<!\S)--([a-z][\w.]*)", ours))
                assert named <= known, f"{path.name}: {named - known} in {line}"


def test_pages_name_every_network_and_optimizer():
    """Their names are written out where a reader looks for what to choose."""
    named = {span for page in ("training", "maps") for span in spans_of(ROOT / f"docs/{page}.md")}
    assert set(models.MODELS) | set(OPTIMIZERS) <= named
    row = next(line for line in (ROOT / "docs/config.md").read_text().splitlines() if "`model.name`" in line)
    assert set(models.MODELS) <= set(re.findall(r"\w+", row))

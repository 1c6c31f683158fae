"""The import rule, by package: from a later one to an earlier one, and no circle."""

import ast
import graphlib
from pathlib import Path

import pytest
from conftest import ROOT

# What the files of a package may import of other packages; within one, any but in a circle.
MAY_IMPORT = {
    "util": set(),
    "terminal": {"util"},
    "nn": set(),
    "hardware": {"util"},
    "hosts": {"util", "hardware.chips"},
    "optim": {"util", "config.fields"},
    "config": {"util", "optim", "tasks.kinds"},
    "data": {"util", "hosts", "config.fields", "tasks.planes"},
    "tasks": {"util", "config.fields"},
    "predictions": {"util", "terminal", "data.dataset", "tasks.planes"},
    "buckets": {"util"},
    "runs": {"util", "terminal", "hosts", "optim", "config", "predictions", "tasks.kinds", "buckets"},
    "training": {
        "util",
        "terminal",
        "nn",
        "hardware",
        "hosts",
        "optim",
        "config.fields",
        "data",
        "tasks",
        "predictions",
        "runs",
    },
    "studies": {"util", "terminal", "hosts", "config", "data", "runs", "tasks.kinds", "pod"},
    # Reports are drawn without JAX, from what a run folder holds.
    "reports": {
        "util",
        "config.dicts",
        "data.pictures",
        "data.decode",
        "data.sources.files",
        "data.sources.splits",
        "predictions.cases",
        "predictions.files",
        "runs.reader",
        "studies.analysis",
        "studies.critical_batch",
        "tasks.planes",
    },
    "exports": {"util", "config.dicts", "runs", "tasks.kinds", "tasks.planes"},
    "doctor": {"util", "terminal", "hardware", "hosts", "optim", "data", "runs", "training"},
    "cli": {"util", "terminal", "hardware", "hosts", "config"},
    "pod": {"util", "hosts", "optim"},
}
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "largebatch").rglob("*.py"))
SCRIPTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("*.py"))


def module_of(path: Path) -> str:
    """ "largebatch/data/cache.py" -> "largebatch.data.cache"."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in [*FILES, *SCRIPTS] if path.name != "__init__.py"}


def imports_of(path: Path) -> set[str]:
    """Project modules that a file imports, as "largebatch.data.cache" or "train"."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & MODULES


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=str)
def test_imports_go_from_later_packages_to_earlier_ones(path):
    package = module_of(path).split(".")[1]
    for name in imports_of(ROOT / path):
        parts = name.split(".")
        assert parts[0] == "largebatch", f"{path} imports {name}, a file of the root"
        if len(parts) == 1 or parts[1] == package:
            continue
        target = ".".join(parts[1:])
        assert MAY_IMPORT[package] & {parts[1], target}, f"{path} imports {name}"


def test_imports_go_in_no_circle():
    graph = {module_of(path): imports_of(ROOT / path) - {module_of(path)} for path in [*FILES, *SCRIPTS]}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_packages_import_nothing_by_themselves_and_model_only_the_layers():
    for path in FILES:
        assert path.name != "__init__.py" or not imports_of(ROOT / path), path
    assert all(name.startswith("largebatch.nn") for name in imports_of(ROOT / "model.py"))


@pytest.mark.parametrize(
    ("package", "owner"),
    [("benchmarks", "bench.py"), ("largebatch.reports", "report.py"), ("largebatch.nn", "model.py")],
)
def test_only_its_script_imports_a_package_of_parts(package, owner):
    scripts = [ROOT / path for path in SCRIPTS if path.name not in (owner, "model.py")]
    for path in [*scripts, *ROOT.glob("configs/*.py")]:
        assert f"from {package}" not in path.read_text(), path

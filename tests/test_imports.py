"""The import rule, by package: from a later one to an earlier one, and no circle."""

import ast
import graphlib
from pathlib import Path

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


def test_imports_go_from_later_packages_to_earlier_ones():
    for path in FILES:
        for name in imports_of(ROOT / path):
            package, (root, *parts) = path.with_suffix("").parts[1], name.split(".")
            assert root == "largebatch", f"{path} imports {name}, a file of the root"
            if parts[:1] not in ([], [package]):
                assert MAY_IMPORT[package] & {parts[0], ".".join(parts)}, f"{path} imports {name}"


def test_imports_go_in_no_circle():
    graph = {module_of(path): imports_of(ROOT / path) - {module_of(path)} for path in [*FILES, *SCRIPTS]}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_packages_import_nothing_by_themselves_and_model_only_the_layers():
    for path in FILES:
        assert path.name != "__init__.py" or not imports_of(ROOT / path), path
    assert all(name.startswith("largebatch.nn") for name in imports_of(ROOT / "model.py"))

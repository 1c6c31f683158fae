"""The import rule: from a higher layer to a lower one, within a layer at most to `devices`."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

LAYERS = {
    "files": 0, "meeting": 0, "untrusted": 0,
    "images": 1, "traces": 1, "batching": 1, "optimizers": 1, "noise_scale": 2, "devices": 1, "metrics": 1,
    "fields": 1, "runs": 1, "display": 1, "state": 1, "data": 2, "schedules": 2, "step": 3,
    "evaluation": 2, "checkpoints": 2, "preemption": 2, "cache": 2, "search": 2, "pack": 2,
    "analysis": 2,
    "config": 3, "doctor": 4, "pod": 3, "trainer": 4, "local_sgd": 4, "resume": 3, "trial_queue": 3, "study": 4,
}  # fmt: skip
# `benchmarks` and `peers` belong to bench.py, `pages` to report.py: nothing else imports them.
SCRIPTS = {"augment", "model", "programs", "train", "evaluate", "sweep", "report", "bench"}
LIBRARY = sorted((ROOT / "largebatch").glob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Project modules that a file imports, as "largebatch.data" or "train"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    modules = {f"largebatch.{name}" for name in LAYERS} | SCRIPTS
    return {name for name in found if name in modules}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_library_imports_run_downwards(path):
    if path.stem == "__init__":
        assert not imports_of(path)
        return
    assert path.stem in LAYERS, "a new file needs a layer here and in README's layout"
    for name in imports_of(path):
        if name in SCRIPTS:
            assert path.stem == "doctor", f"{path.name} imports the script {name}"
            continue
        target = name.removeprefix("largebatch.")
        downwards = LAYERS[target] < LAYERS[path.stem]
        same = LAYERS[target] == LAYERS[path.stem]
        assert downwards or (same and target == "devices"), f"{path.name} imports {name}"


def test_model_imports_nothing_of_ours():
    assert not imports_of(ROOT / "model.py")


@pytest.mark.parametrize("path", [ROOT / "report.py", *(ROOT / "pages").glob("*.py")], ids=lambda path: path.stem)
def test_report_and_its_pages_import_only_what_reads_run_folders(path):
    readers = {"runs", "analysis", "files", "images", "untrusted"}
    assert imports_of(path) <= {f"largebatch.{name}" for name in readers}


PARTS = {"benchmarks": ["bench.py"], "peers": ["bench.py"], "pages": ["report.py"], "layers": ["model.py"]}
USERS = [*LIBRARY, *ROOT.glob("*.py"), *ROOT.glob("configs/*.py")]


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.stem)
def test_only_its_script_imports_a_package_of_parts(path):
    text = path.read_text()
    for package, scripts in PARTS.items():
        if path.name not in scripts:
            assert f"from {package}" not in text
            assert f"import {package}" not in text


def test_every_root_script_is_known():
    assert {path.stem for path in ROOT.glob("*.py")} <= SCRIPTS


def test_the_rule_sees_an_upward_import(tmp_path):
    path = tmp_path / "data.py"
    path.write_text("from largebatch import UserError, step\nimport train\n")
    assert imports_of(path) == {"largebatch.step", "train"}

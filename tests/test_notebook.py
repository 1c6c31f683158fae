"""The notebook, from a clean clone to the report, in a kernel of its own."""

import json
import subprocess
from pathlib import Path

import nbclient
import nbformat
import pytest
from conftest import ROOT
from machines import QUICKLY

NOTEBOOK = ROOT / "notebooks" / "from_clone_to_report.ipynb"
FIELDS = {
    "dataset.name": "synthetic",
    "dataset.image_size": 16,
    "dataset.num_examples": 400,
    "train.inner_steps": 5,
    "train.outer_steps": 2,
    "batch.size": 64,
}


def with_parameters(notebook, **values: str):
    """Set values in the notebook's cell of parameters."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert all(f"{name} = " in cell.source for name in values)
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())  # the last of a name counts
    return notebook


def run(notebook, folder: Path) -> list[str]:
    """Run all cells in a folder; return what each of those with code has put out, as JSON."""
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return [json.dumps(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_from_a_clean_clone_to_a_report(tmp_path, session_cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("XLA_FLAGS", QUICKLY["XLA_FLAGS"])
    fields = FIELDS | {"augment.cache_dir": session_cache}
    notebook = with_parameters(
        nbformat.read(NOTEBOOK, as_version=4),
        REPOSITORY=f"file://{ROOT}",
        FIELDS=" ".join(f"--config.{name}={value}" for name, value in fields.items()),
        CONFIG="configs/default.py",
        WORKDIR="runs/first",
    )
    _, install, trained, evaluated, report, exported, predicted = run(notebook, tmp_path)
    clone = tmp_path / "largebatch"
    assert "jax" in install
    assert "final val accuracy" in trained
    assert "test split" in evaluated
    assert "iframe" in report
    summary = json.loads((clone / "runs" / "first" / "summary.json").read_text())
    assert f"{summary['best_val_accuracy']:.4f}" in (clone / "report.html").read_text()
    assert "SHA-256 of SHA256SUMS" in exported
    assert predicted.count("', '") == 3, predicted  # four names of classes
    assert subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True).stdout == ""


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]

"""bench.py card: measurements in their time, each written when it is there, and the whole command."""

import json
import time

import pytest
from conftest import make_folder, run_script
from machines import QUICKLY

from benchmarks import card
from benchmarks.card import Measurement


def rows_of(path) -> list[dict]:
    """The rows that are written so far."""
    return json.loads(path.read_text())["rows"]


def test_each_row_is_written_before_the_next_and_failures_are_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "card.json"

    def measurements(size):
        yield Measurement("no data", ("train.py",), 1, 9, data=card.EUROSAT)
        (row,) = rows_of(path)
        assert (row["status"], row["reason"]) == ("skipped", "--data: no EuroSAT.zip there")
        yield Measurement("no time", ("scaling",), 200, 300)
        assert rows_of(path)[-1]["reason"].startswith("needs 200 s, ")
        yield Measurement("fails", ("nothing",), 1, 60)
        assert rows_of(path)[-1]["error"].startswith("bench.py: give one command")
        yield Measurement("is killed", ("scaling",), 1, 0.2)

    monkeypatch.setattr(card, "measurements", measurements)
    started = time.monotonic()
    result = card.bench_card(2, "tiny", str(path), str(tmp_path))
    assert time.monotonic() - started < 60
    assert rows_of(path) == result["rows"]
    assert result["rows"][-1]["error"] == "killed after 0 s"
    card.print_card(result)
    assert capsys.readouterr().out.endswith("0 measured, 2 skipped, 2 failed\n")


def test_the_command_names_all_that_it_has_no_time_for(tmp_path):
    path = tmp_path / "card.json"
    done = run_script("bench.py", "card", "--minutes=0", f"--json={path}", f"--data={tmp_path}")
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in rows_of(path)]
    assert names[0] == "step at 172800"
    assert len(set(names)) == len(names)
    assert {row["status"] for row in rows_of(path)} == {"skipped"}


@pytest.mark.full
def test_figures_are_those_of_the_measured_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("XLA_FLAGS", QUICKLY["XLA_FLAGS"])
    make_folder(tmp_path / card.EUROSAT, {str(label): 60 for label in range(3)})
    chosen = ("start", "kernels at 16", "eurosat_fast seed 0")
    found = {one.name: one for one in card.measurements("tiny")}
    rows = [card.measure(found[name], 600, tmp_path / name, tmp_path) | {"name": name} for name in chosen]
    assert not [row["error"] for row in rows if row["status"] == "failed"]
    start, kernels, recipe = rows
    cold, warm = start["starts"]
    assert 0 < warm["compile"] < cold["compile"] < cold["to_first_step"] < cold["to_exit"]
    assert 0 < sum(one["ms"] for one in kernels["kernels"]) <= 1.001 * kernels["ms_per_step"]
    assert recipe["summary"] == json.loads((tmp_path / chosen[-1] / "summary.json").read_text())
    assert recipe["took_sec"] > recipe["summary"]["train_sec"] > 0
    assert "144 training images" in recipe["printed"]
    card.print_card({"rows": rows})
    assert "3 measured, 0 skipped, 0 failed" in capsys.readouterr().out

"""bench.py card: measurements in their time, each written when it is there, and the whole command."""

import json
import time

import pytest
from conftest import make_folder, on_devices, run_script

from benchmarks import card
from benchmarks.card import Measurement


def rows_of(path) -> list[dict]:
    """The rows that are written so far."""
    return json.loads(path.read_text())["rows"]


def test_each_row_is_written_before_the_next_and_failures_are_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "card.json"

    def measurements(size):
        yield Measurement("no data", ("train.py",), 1, 9, data=card.EUROSAT)
        assert rows_of(path)[-1] == {
            **rows_of(path)[-1],
            "status": "skipped",
            "reason": "--data: no EuroSAT.zip there",
        }
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


@pytest.mark.parametrize("size", card.BATCH_SIZES)
def test_measurements_are_named_apart_and_fit_into_ten_minutes_at_least_once(size):
    found = list(card.measurements(size))
    assert len({one.name for one in found}) == len(found)
    assert sum(one.least_sec for one in found[:6]) < 600
    assert found[0].name == f"step at {card.BATCH_SIZES[size][0]}"


@pytest.mark.full
def test_a_machine_is_measured(tmp_path):
    path = tmp_path / "card.json"
    done = run_script(
        "bench.py", "card", "--size=tiny", f"--json={path}", f"--data={tmp_path}", env=on_devices(1), timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in rows_of(path)}
    skipped = [name for name, row in rows.items() if row["status"] == "skipped"]
    assert all(name.endswith("seed 0") for name in skipped)
    assert [name for name in rows if name not in skipped] == [
        "step at 16",
        "kernels at 16",
        "start",
        "processes sharing devices",
    ]
    assert not [row["error"] for row in rows.values() if row["status"] == "failed"]
    beside = rows["step at 16"]["rows"]
    assert [one["name"].split(",")[0] for one in beside[:3]] == ["ours", "minimal.py", "ours"]
    for one in beside:
        assert one["images_per_sec"]["median"] == pytest.approx(16e3 / one["ms"]["median"])
        assert 0 < one["ours_beside_it"]["min"] <= one["ours_beside_it"]["max"]
    assert 0 < beside[0]["of_peak"] < 3
    assert "| minimal.py" in done.stdout
    profile, processes = rows["kernels at 16"], rows["processes sharing devices"]["workers"]
    assert 0 < sum(one["ms"] for one in profile["kernels"]) <= 1.001 * profile["ms_per_step"]
    assert processes["images_per_sec"] == pytest.approx(sum(processes["each"]))
    cold, warm = rows["start"]["starts"]
    assert 0 < warm["compile"] < cold["compile"] < cold["to_first_step"] < cold["to_exit"]
    assert "default, warm caches" in done.stdout


@pytest.mark.full
def test_a_recipe_is_trained_and_its_figures_are_those_of_the_run(tmp_path):
    make_folder(tmp_path / card.EUROSAT, {str(label): 60 for label in range(3)})
    (recipe,) = [one for one in card.measurements("tiny") if one.name == "eurosat_muon seed 0"]
    row = card.measure(recipe, 300, tmp_path / "run", tmp_path)
    assert row["status"] == "measured", row
    assert row["summary"] == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert row["took_sec"] > row["summary"]["train_sec"] > 0
    assert "144 training images" in row["printed"]

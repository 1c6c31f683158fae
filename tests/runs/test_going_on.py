"""A run is resumed by its folder alone, and beyond the end that it first had."""

import json

import pytest
from conftest import run_script

import train
from largebatch.util import UserError


@pytest.mark.parametrize("ended", [True, False])
def test_a_workdir_alone_goes_on_by_its_own_config(small_config, tmp_path, ended):
    small_config.train.outer_steps = 1
    train.train_and_evaluate(small_config, str(tmp_path / "run"))
    before = (tmp_path / "run" / "config.json").read_bytes()
    if not ended:  # killed before the last file was written
        (tmp_path / "run" / "summary.json").unlink()
    result = run_script("train.py", "--workdir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_finished_run_at_a_constant_rate_can_be_made_longer(small_config, tmp_path):
    train.train_and_evaluate(small_config, str(tmp_path / "longer"))
    small_config.train.outer_steps += 1
    whole = train.train_and_evaluate(small_config, str(tmp_path / "whole"))
    longer = train.train_and_evaluate(small_config, str(tmp_path / "longer"))
    assert longer["steps"] == 9
    assert longer["params_sha256"] == whole["params_sha256"]


def test_a_run_whose_rate_falls_to_its_end_says_how_to_train_on(small_config, tmp_path):
    small_config.schedule.name = "cosine"
    train.train_and_evaluate(small_config, str(tmp_path))
    before = (tmp_path / "summary.json").read_bytes()
    small_config.train.outer_steps += 1
    with pytest.raises(
        UserError, match=r"^[^\n]*train\.outer_steps: 3[^\n]*schedule\.name[^\n]*train\.init_from[^\n]*$"
    ):
        train.train_and_evaluate(small_config, str(tmp_path))
    assert (tmp_path / "summary.json").read_bytes() == before


def test_rows_without_a_config_are_no_run_to_go_on(small_config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"holds metrics.jsonl but no config.json; give a new folder"):
        train.train_and_evaluate(small_config, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]

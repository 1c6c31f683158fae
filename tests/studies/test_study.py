import json
import logging

import pytest
from conftest import ROOT, assert_one_line_error, run_script

import model as models
from configs import default
from largebatch.studies.database import is_sqlite_file_in
from largebatch.studies.study import adopt_recorded_config, read_space_file, refuse_another
from largebatch.util import UserError

SPACE = """
from pathlib import Path
from optuna.distributions import CategoricalDistribution

Path({ran!r}).touch()

def get_space():
    return {{"optimizer.name": CategoricalDistribution(["lamb", "sgd"])}}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a space file that leaves a trace when it is run, and a study folder."""
    folder = tmp_path / "here"
    (folder / "study").mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "space.py").write_text(SPACE.format(ran=str(tmp_path / "ran")))
    return folder


def recorded_by(file) -> dict:
    """What a study.json says of the space file with which its study was started."""
    return {"space_sha256": read_space_file(ROOT, file, {}, models.MODELS, given=True).sha256}


def test_a_recorded_space_file_of_ones_own_is_run_as_it_was(here, tmp_path, caplog):
    there = recorded_by(here / "space.py")
    (tmp_path / "ran").unlink()
    assert list(read_space_file(here / "study", here / "space.py", there, models.MODELS, given=False).space) == [
        "optimizer.name"
    ]
    assert (tmp_path / "ran").exists()
    assert caplog.messages == [f"runs the space file {here / 'space.py'}, which {here / 'study'} names"]
    ours = ROOT / "configs" / "sweeps" / "optimizers.py"
    read_space_file(here / "study", ours, recorded_by(ours), models.MODELS, given=False)


@pytest.mark.parametrize("case", ["elsewhere", "link", "in the study", "changed", "no digest", "no text"])
def test_a_recorded_space_file_that_may_be_someone_elses_is_run_only_when_it_is_given(here, tmp_path, case):
    file, there = here / "space.py", recorded_by(here / "space.py")
    (tmp_path / "ran").unlink()
    if case in ("elsewhere", "link"):
        file = file.rename(tmp_path / "space.py")
        words = "lies outside this project and the current folder"
        if case == "link":
            (here / "linked.py").symlink_to(file)
            file = here / "linked.py"
    elif case == "in the study":
        file, words = file.rename(here / "study" / "space.py"), "lies in that folder itself"
    elif case == "changed":
        file.write_text(file.read_text() + "\n# as it is today\n")
        words = "has changed since"
    else:
        there, words = {} if case == "no digest" else {"space_sha256": None}, "recorded without a SHA-256"
    with pytest.raises(UserError, match=rf"space.*{words}.*; give --space FILE to run it"):
        read_space_file(here / "study", file, there, models.MODELS, given=False)
    assert not (tmp_path / "ran").exists()
    read_space_file(here / "study", file, there, models.MODELS, given=True)
    assert (tmp_path / "ran").exists()


def test_the_command_does_not_run_what_a_foreign_study_names(tmp_path):
    (tmp_path / "space.py").write_text(SPACE.format(ran=str(tmp_path / "ran")))
    (tmp_path / "study").mkdir()
    description = {"space_file": str(tmp_path / "space.py"), "config": default.get_config().to_dict()}
    (tmp_path / "study" / "study.json").write_text(json.dumps(description))
    (tmp_path / "elsewhere").mkdir()
    result = run_script(ROOT / "sweep.py", f"--study={tmp_path / 'study'}", cwd=tmp_path / "elsewhere")
    assert not (tmp_path / "ran").exists()
    assert_one_line_error(result, "names the space file", "lies outside", "give --space FILE")


def test_places_that_a_study_names_are_said(tmp_path, caplog):
    config, recorded = default.get_config(), default.get_config()
    recorded.dataset.path, recorded.augment.cache_dir = "/data/x.zip", str(tmp_path / "study" / "cache")
    recorded.batch.trace, recorded.batch.size = "/data/trace.csv", 7
    recorded.devices.update({"coordinator_address": "far.away:1", "num_hosts": 2, "host_index": 0})
    with caplog.at_level(logging.WARNING, "largebatch"):
        adopt_recorded_config(config, recorded.to_dict(), tmp_path / "study" / "study.json")
    assert caplog.messages == [
        f"uses dataset.path /data/x.zip, which {tmp_path / 'study'} names",
        f"uses batch.trace /data/trace.csv, which {tmp_path / 'study'} names",
    ]
    assert (config.dataset.path, config.batch.size) == ("/data/x.zip", 7)
    assert config.devices.to_dict() == default.get_config().devices.to_dict()


@pytest.mark.parametrize("recorded", [None, [], {}, {"devices": {}}, {"devices": {"platform": 3}}])
def test_a_study_json_without_a_config_is_one_line(tmp_path, recorded):
    with pytest.raises(UserError, match=r"study.json holds no config of a run or study"):
        adopt_recorded_config(default.get_config(), recorded, tmp_path / "study.json")


def test_a_study_of_another_order_of_examples_is_another():
    description = {"config": default.get_config().to_dict(), "order_version": 2}
    old = {"config": description["config"]}
    refuse_another(ROOT, description, dict(description))
    with pytest.raises(UserError, match="holds another study: order_version: 2 here, 1 there"):
        refuse_another(ROOT, description, old)


def test_which_databases_lie_in_the_folder(tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "linked.db").symlink_to(tmp_path / "far.db")
    inside = lambda url: is_sqlite_file_in(url, tmp_path / "study")  # noqa: E731
    assert inside(f"sqlite:///{tmp_path}/study/study.db")
    assert not inside(f"sqlite:///{tmp_path}/study/linked.db")
    assert not inside(f"sqlite:///{tmp_path}/study/../far.db")
    assert not inside(f"sqlite:///{tmp_path}/study/study.db?uri=true")
    assert not inside("sqlite://")
    assert not inside("postgresql://host/db")

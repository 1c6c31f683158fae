"""A run keeps the dtype that it began with, on machines that would choose another."""

import json
import logging
import sys

import pytest
from conftest import assert_one_line_error, run_script, typed
from machines import SCRIPT_ON, become
from test_resume import assert_same_run

import evaluate
import examine
import model as models
import train
from configs import eurosat, eurosat_muon
from largebatch import cli
from largebatch.hardware.chips import Hardware
from largebatch.hardware.targets import Target
from largebatch.hosts import collectives, preemption
from largebatch.runs import checkpoints
from largebatch.runs.folder import RunFolder
from largebatch.training import trainer
from largebatch.util import UserError

OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


@pytest.fixture
def config(small_config, monkeypatch):
    """Three calls of an update in each outer loop."""
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    small_config.model.dtype = "auto"
    small_config.batch.size = 128
    return small_config


@pytest.fixture
def said(caplog):
    """What the log says of the dtype, so far."""
    caplog.set_level(logging.INFO, "largebatch")
    return lambda: [message for message in caplog.messages if message.startswith("model.dtype")]


def stop_after_first_call(monkeypatch, config, workdir) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preemption, "agree", lambda vote=0: (15, vote))
        with pytest.raises(preemption.Stopped):
            train.train_and_evaluate(config, str(workdir))


def stored_dtype(workdir) -> str:
    return json.loads((workdir / "config.json").read_text())["model"]["dtype"]


@pytest.mark.parametrize("first", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
def test_a_run_goes_on_in_its_dtype_and_says_so(config, tmp_path, monkeypatch, said, capfd, first):
    become(monkeypatch, first)
    train.train_and_evaluate(config, str(tmp_path / "whole"))
    assert f"8 cpu devices on 1 hosts, computing in {first}; " in capfd.readouterr().out
    stop_after_first_call(monkeypatch, config, tmp_path / "cut")
    assert said() == []
    become(monkeypatch, OTHER[first])
    train.train_and_evaluate(config, str(tmp_path / "cut"))
    line = f"model.dtype: auto is {first} in this run; here it would be {OTHER[first]}"
    assert said() == [line]
    assert f"computing in {first}; " in capfd.readouterr().out
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert train.train_and_evaluate(config, str(tmp_path / "cut"))["status"] == "done"  # nothing left to do
    assert said() == [line] * 2
    assert config.model.dtype == "auto"  # the caller's own

    assert stored_dtype(tmp_path / "cut") == first
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        assert checkpoints.read_description(path)["config"]["model"]["dtype"] == first
    assert evaluate.load_run(tmp_path / "cut").config.model.dtype == first


def test_another_dtype_is_another_run_and_the_same_one_is_not(config, tmp_path, monkeypatch, said):
    become(monkeypatch, "float32")
    stop_after_first_call(monkeypatch, config, tmp_path)
    config.model.dtype = "bfloat16"
    with pytest.raises(UserError, match=r"of another config: model.dtype: 'bfloat16' here, 'float32' there$"):
        train.train_and_evaluate(config, str(tmp_path))
    become(monkeypatch, "bfloat16")
    config.model.dtype = "float32"
    assert train.train_and_evaluate(config, str(tmp_path))["status"] == "done"
    assert said() == []


def test_a_run_that_began_in_an_explicit_dtype_goes_on_by_auto(config, tmp_path, monkeypatch, said):
    become(monkeypatch, "bfloat16")
    config.model.dtype = "float32"
    stop_after_first_call(monkeypatch, config, tmp_path)
    config.model.dtype = "auto"
    assert train.train_and_evaluate(config, str(tmp_path))["status"] == "done"
    assert said() == ["model.dtype: auto is float32 in this run; here it would be bfloat16"]
    assert stored_dtype(tmp_path) == "float32"


@pytest.mark.parametrize("stored", [{}, {"model": 3}, {"model": {"dtype": "auto"}}, {"model": {"dtype": ["x"]}}])
def test_a_config_that_names_no_dtype_is_another(config, tmp_path, monkeypatch, stored):
    become(monkeypatch, "bfloat16")
    assert cli.settle_dtype(typed(config), lambda: stored).model.dtype == "bfloat16"
    plain = config.to_dict()
    plain["model"]["dtype"] = "auto"  # which no run stores
    RunFolder(tmp_path).begin(plain)
    with pytest.raises(UserError, match=r"model.dtype: 'bfloat16' here, 'auto' there"):
        train.train_and_evaluate(config, str(tmp_path))


def test_the_recipes_choose_and_their_users_may_too(monkeypatch):
    become(monkeypatch, "bfloat16")
    for recipe in (eurosat, eurosat_muon):
        config, plain = cli.start(recipe.get_config(), models.MODELS)
        assert (config.model.dtype, plain["model"]["dtype"]) == ("bfloat16", "bfloat16")
    given = recipe.get_config()
    given.model.dtype = "float32"
    config, plain = cli.start(given, models.MODELS)
    assert (config.model.dtype, plain["model"]["dtype"]) == ("float32", "float32")


def test_the_doctor_examines_what_would_run(config, monkeypatch):
    def prepare(config, *_):
        raise UserError(f"examined in {config.model.dtype}")

    become(monkeypatch, "bfloat16")
    monkeypatch.setattr(examine, "prepare", prepare)
    with pytest.raises(UserError, match=r"^examined in bfloat16$"):
        examine.run(config, here=True, target_name=None)


def test_what_is_compiled_for_another_machine_is_as_it_would_run_there(config, monkeypatch):
    def choose_plan(config, *_, **__):
        raise UserError(f"compiled in {config.model.dtype}")

    become(monkeypatch, "float32")
    target = Target("v3:4x4", Hardware("tpu", "TPU v3", 32), devices=[])
    monkeypatch.setattr(examine, "find_target", lambda name: target)
    monkeypatch.setattr(examine, "choose_plan", choose_plan)
    with pytest.raises(UserError, match=r"^compiled in bfloat16$"):
        examine.run(config, here=False, target_name=target.name)


# ---- hosts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recorded", "expected"), [(None, "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize("here", ["float32", "bfloat16"])
def test_host_0_decides(config, monkeypatch, said, here, recorded, expected):
    """As on host 1, where host 0's machine has bfloat16, and host 0 alone reads the folder."""
    become(monkeypatch, here)
    monkeypatch.setattr(collectives, "is_primary", lambda: False)
    monkeypatch.setattr(collectives, "json_from_primary", lambda value: recorded or "bfloat16")
    settled = cli.settle_dtype(typed(config), lambda: pytest.fail("host 1 read the folder"))
    assert settled.model.dtype == expected
    differs = f"model.dtype: auto is {expected} in this run; here it would be {here}"
    assert said() == ([differs] if expected != here else [])


SETTLE = """
import json, logging, sys
from pathlib import Path
import jax
import model
from configs import default
from largebatch import cli

said = []
logger = logging.getLogger("largebatch")
logger.setLevel(logging.INFO)
logger.handle = lambda record: said.append(record.getMessage())
config = default.get_config()
config.model.dtype = "auto"
config, plain = cli.start(config, model.MODELS)
found = [config.model.dtype, plain["model"]["dtype"], said]
(Path(sys.argv[1]) / str(jax.process_index())).write_text(json.dumps(found))
"""


@pytest.mark.full
def test_hosts_of_two_kinds_compute_in_one_dtype(tmp_path):
    (tmp_path / "settle.py").write_text(SETTLE)
    pod = ["-m", "largebatch.pod", "--hosts", 2, "--devices", 1, "--"]
    script = [sys.executable, "-c", SCRIPT_ON, "float32,bfloat16", tmp_path / "settle.py", tmp_path]
    done = run_script(*pod, *script)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / host).read_text()) for host in "01"]
    line = "model.dtype: auto is float32 in this run; here it would be bfloat16"
    assert found == [["float32", "float32", []], ["float32", "float32", [line]]]


def test_what_is_allowed_is_said(tmp_path):
    result = run_script("train.py", "--config.model.dtype=float16", f"--workdir={tmp_path / 'run'}")
    assert_one_line_error(result, "model.dtype: 'float16'; allowed: float32 | bfloat16 | auto")

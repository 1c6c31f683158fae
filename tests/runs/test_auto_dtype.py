"""A run keeps the dtype that it began with, on machines that would choose another."""

import json
import logging
import sys

import pytest
from conftest import run_script
from machines import SCRIPT_ON, become
from test_resume import assert_same_run

import evaluate
import examine
import train
from largebatch.hardware.chips import Hardware
from largebatch.hardware.targets import Target
from largebatch.hosts import preemption
from largebatch.runs import checkpoints
from largebatch.training import trainer
from largebatch.util import UserError

OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


@pytest.fixture
def config(small_config, monkeypatch):
    """Three calls of a step in each outer loop."""
    monkeypatch.setattr(trainer, "SECONDS_PER_CALL", 0.0)
    small_config.model.dtype = "auto"
    small_config.batch.size = 128
    return small_config


@pytest.fixture
def said(caplog):
    """Return a function for the messages about the dtype, so far."""
    caplog.set_level(logging.INFO, "largebatch")
    return lambda: [message for message in caplog.messages if message.startswith("model.dtype")]


def stop_after_first_call(monkeypatch, config, workdir) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(preemption, "agree", lambda vote=0: (15, vote))
        with pytest.raises(preemption.Stopped):
            train.train_and_evaluate(config, str(workdir))


@pytest.mark.parametrize("first", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
def test_a_run_goes_on_in_its_dtype_and_says_so(config, tmp_path, monkeypatch, said, capfd, first):
    become(monkeypatch, first)
    train.train_and_evaluate(config, str(tmp_path / "whole"))
    assert f"8 cpu devices on 1 hosts, computing in {first}; " in capfd.readouterr().out
    stop_after_first_call(monkeypatch, config, tmp_path / "cut")
    assert said() == []
    become(monkeypatch, OTHER[first])
    train.train_and_evaluate(config, str(tmp_path / "cut"))
    assert said() == [f"model.dtype: auto is {first} in this run; here it would be {OTHER[first]}"]
    assert f"computing in {first}; " in capfd.readouterr().out
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert train.train_and_evaluate(config, str(tmp_path / "cut"))["status"] == "done"  # nothing left to do
    assert config.model.dtype == "auto"  # the caller's own

    assert json.loads((tmp_path / "cut" / "config.json").read_text())["model"]["dtype"] == first
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        assert checkpoints.read_description(path)["config"]["model"]["dtype"] == first
    assert evaluate.load_run(tmp_path / "cut").config.model.dtype == first


def test_a_dtype_that_was_given_is_kept_by_auto_and_another_is_another_run(config, tmp_path, monkeypatch, said):
    become(monkeypatch, "bfloat16")
    config.model.dtype = "float32"
    stop_after_first_call(monkeypatch, config, tmp_path)
    config.model.dtype = "bfloat16"
    with pytest.raises(UserError, match=r"of another config: model.dtype: 'bfloat16' here, 'float32' there$"):
        train.train_and_evaluate(config, str(tmp_path))
    assert said() == []
    config.model.dtype = "auto"
    assert train.train_and_evaluate(config, str(tmp_path))["status"] == "done"
    assert said() == ["model.dtype: auto is float32 in this run; here it would be bfloat16"]


@pytest.mark.parametrize(("here", "name", "dtype"), [(True, None, "float32"), (False, "v3:4x4", "bfloat16")])
def test_what_is_examined_is_what_would_run(config, monkeypatch, here, name, dtype):
    def stop(config, *_, **__):
        raise UserError(f"examined in {config.model.dtype}")

    become(monkeypatch, "float32")
    monkeypatch.setattr(examine, "prepare", stop)
    monkeypatch.setattr(examine, "choose_plan", stop)
    target = Target("v3:4x4", Hardware("tpu", "TPU v3", 32), devices=[])
    monkeypatch.setattr(examine, "find_target", lambda name: target)
    with pytest.raises(UserError, match=f"^examined in {dtype}$"):
        examine.run(config, here=here, target_name=name)


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
@pytest.mark.parametrize("first", OTHER)
def test_hosts_of_two_kinds_compute_in_the_dtype_of_host_0(tmp_path, first):
    (tmp_path / "settle.py").write_text(SETTLE)
    pod = ["-m", "largebatch.pod", "--hosts", 2, "--devices", 1, "--"]
    script = [sys.executable, "-c", SCRIPT_ON, f"{first},{OTHER[first]}", tmp_path / "settle.py", tmp_path]
    done = run_script(*pod, *script)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / host).read_text()) for host in "01"]
    line = f"model.dtype: auto is {first} in this run; here it would be {OTHER[first]}"
    assert found == [[first, first, []], [first, first, [line]]]

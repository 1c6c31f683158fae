"""A run keeps the dtype that it began with, on machines that would choose another."""

import json
import logging
import sys

import pytest
from conftest import run_script
from machines import SCRIPT_ON, become

import evaluate
import train
from largebatch import cli
from largebatch.hosts import preemption
from largebatch.runs import checkpoints
from largebatch.runs.folder import RunFolder
from largebatch.util import UserError
from model import MODELS

OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


@pytest.fixture
def config(small_config):
    small_config.model.dtype = "auto"
    return small_config


@pytest.fixture
def said(caplog):
    """Return a function for the messages about the dtype, so far."""
    caplog.set_level(logging.INFO, "largebatch")
    return lambda: [message for message in caplog.messages if message.startswith("model.dtype")]


def test_a_run_resumes_in_its_dtype_and_says_so(config, tmp_path, monkeypatch, said, capfd):
    become(monkeypatch, "float32")
    with monkeypatch.context() as patch:
        patch.setattr(preemption, "agree", lambda vote=0: (15, vote))
        with pytest.raises(preemption.Stopped):
            train.train_and_evaluate(config, str(tmp_path))
    assert said() == []
    become(monkeypatch, "bfloat16")
    assert train.train_and_evaluate(config, str(tmp_path))["status"] == "done"
    assert said() == ["model.dtype: auto is float32 in this run; here it would be bfloat16"]
    assert capfd.readouterr().out.count("computing in float32; ") == 2
    assert train.train_and_evaluate(config, str(tmp_path))["status"] == "done"  # nothing left to do
    assert config.model.dtype == "auto"  # the caller's own
    assert json.loads((tmp_path / "config.json").read_text())["model"]["dtype"] == "float32"
    for path in (tmp_path / "checkpoints").iterdir():
        assert checkpoints.read_description(path)["config"]["model"]["dtype"] == "float32"
    assert evaluate.load_run(tmp_path).config.model.dtype == "float32"


@pytest.mark.parametrize("first", OTHER)
def test_a_dtype_that_was_given_is_kept_by_auto_and_another_is_another_run(
    config, tmp_path, monkeypatch, said, first
):
    become(monkeypatch, OTHER[first])
    config.model.dtype = first
    run = RunFolder(tmp_path)
    run.begin(config.to_dict())
    config.model.dtype = OTHER[first]
    with pytest.raises(UserError, match=f"of another config: model.dtype: '{OTHER[first]}' here, '{first}' there$"):
        train.train_and_evaluate(config, str(tmp_path))
    assert said() == []
    config.model.dtype = "auto"
    typed_config, plain = cli.start(config, MODELS, run.read_config)
    assert typed_config.model.dtype == plain["model"]["dtype"] == first
    assert said() == [f"model.dtype: auto is {first} in this run; here it would be {OTHER[first]}"]


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

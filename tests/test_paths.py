"""Every path that a user gives may begin with ~ or ~USER, in every flag and field, and no folder is called "~"."""

import re

import pytest

import report
import train
from largebatch import pod
from largebatch.config import dicts
from largebatch.config.dicts import RULES
from largebatch.util import UserError, expanded

NOBODY = "~no-such-user/x"


def test_only_a_tilde_at_the_beginning_is_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/a") == "/home/me/a"
    assert expanded("~") == "/home/me"
    for path in ("a/~/b", "./~", "gs://bucket/~/a", "", "a~"):
        assert expanded(path) == path
    with pytest.raises(UserError, match=r"^--out: ~no-such-user/x: there is no home folder ~no-such-user; allowed"):
        expanded(NOBODY, "--out")


def test_every_field_that_may_hold_any_text_is_known_as_a_path_or_as_none():
    others = {"dataset.name", "dataset.tfds_split", "model.name", "log.wandb_project"}
    others |= {"devices.coordinator_address"}
    texts = {field for field, rule in RULES.items() if rule.allows("any text")}
    assert texts == {*dicts.PATHS, *others}


@pytest.mark.parametrize(
    ("parse", "arguments"),
    [
        (report.parse, [NOBODY]),
        (report.parse, ["run", "--out", NOBODY]),
        (pod.parse, ["--hosts=1", "--devices=1", "--availability", NOBODY, "--", "true"]),
    ],
)
def test_nobodys_home_is_refused_by_name_in_an_argument(parse, arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert f"{NOBODY}: there is no home folder ~no-such-user" in capsys.readouterr().err.splitlines()[-1]


SLOW = {"train.init_from"}  # read once all is compiled


@pytest.mark.parametrize("field", [pytest.param(f, marks=[pytest.mark.full] * (f in SLOW)) for f in dicts.PATHS])
def test_nobodys_home_is_refused_by_name_in_a_field(small_config, tmp_path, monkeypatch, field):
    monkeypatch.chdir(tmp_path)
    small_config.dataset.name = "mine" if field == "dataset.path" else "synthetic"
    small_config.update_from_flattened_dict({field: NOBODY})
    with pytest.raises(UserError, match=rf"^{re.escape(field)}: {NOBODY}"):
        train.train_and_evaluate(small_config, "run")
    assert not (tmp_path / "~no-such-user").exists()

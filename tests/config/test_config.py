import importlib
import os
import re
import sys
import warnings

import jax
import pytest
from absl import flags
from conftest import ROOT, typed

import model as models
from configs import default
from largebatch import cli
from largebatch.config import dicts, page, rules
from largebatch.config.dicts import RULES
from largebatch.config.rules import ALIASES, nearest_field
from largebatch.optim import schedules
from largebatch.optim.batch_schedule import DECAY_BY
from largebatch.optim.optimizers import OPTIMIZERS
from largebatch.tasks.kinds import KINDS
from largebatch.util import UserError

BAD_FIELDS = {  # beside texts that are no values
    "dataset.channels": 0,
    "augment.crop_scale": 0.0,
    "augment.brightness": 1.1,
    "batch.micro_batch_size": -4,
    "optimizer.name": "lambb",
    "optimizer.momentum": 1.0,
    "train.inner_steps": 0,
    "train.target_accuracy": 1.5,
}


def test_the_default_is_allowed_and_every_field_has_a_rule():
    typed(default.get_config())
    assert set(dicts.flatten(default.get_config().to_dict())) == set(RULES)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_file_is_allowed_and_documents_its_command(path):
    module = importlib.import_module(f"configs.{path.stem}")
    typed(module.get_config())
    assert "python train.py" in module.__doc__
    assert "Expected" in module.__doc__


# Values that are allowed by themselves.
ALLOWED = [
    *({"dataset.image_size": size} for size in (None, 8, 1024, (8, 12), [1024, 8])),
    *({"optimizer.b2": 0.9999999}, {"optimizer.learning_rate": 1e-37}, {"train.target_accuracy": 1.0}),
    *({"devices.coordinator_address": address} for address in ("10.0.0.1:1234", "node-7.a", ":1234", "[::1]:80")),
    {"dataset.resize": "crop", "dataset.image_size": 32},
    {"dataset.splits": "published", "dataset.split_file": "x-{split}.csv", "dataset.tfds_split": "train+test"},
    {"dataset.splits": "own", "dataset.tfds_split": "train"},
    {"train.inner_steps": 1, "train.outer_steps": 2**31 - 1},
]
IN_FLOAT32 = "a number .* in float32"
SIZES = "an integer from 8 to 1024, a tuple"
ADASCALE = {"schedule.scaling": "adascale", "optimizer.name": "sgd"}
# Fields, the one that is named, and what is allowed of it.
REFUSED = [
    *(({field: value}, field, re.escape(RULES[field].text)) for field, value in BAD_FIELDS.items()),
    ({"optimizer.b2": 0.99999999}, "optimizer.b2", IN_FLOAT32),  # 1 there, by which Adam divides zero by zero
    ({"train.rollback_factor": 1e-46}, "train.rollback_factor", IN_FLOAT32),
    ({"optimizer.learning_rate": 1e-50}, "optimizer.learning_rate", IN_FLOAT32),  # 0
    ({"optimizer.learning_rate": 1e39}, "optimizer.learning_rate", IN_FLOAT32),  # infinite
    ({"optimizer.weight_decay": float("inf")}, "optimizer.weight_decay", IN_FLOAT32),
    *(({"dataset.image_size": size}, "dataset.image_size", SIZES) for size in (7, True, 8.0, "8", (8,), (8, 7))),
    *(({"batch.size": size}, "batch.size", "an integer >= 1, or 'full'") for size in (True, 1.5, "many", None)),
    *(
        ({"devices.coordinator_address": address}, "devices.coordinator_address", "")
        for address in ("", ":", "host:", "host:70000", "a b", "http://host:1")
    ),
    ({"devices.num_hosts": 2, "devices.host_index": 2}, "devices.host_index", "0 to devices.num_hosts - 1"),
    ({"augment.views": "none", "eval.view_average": True}, "eval.view_average", "False with augment.views 'none'"),
    ({"dataset.resize": "crop"}, "dataset.resize", "stretch without dataset.image_size"),
    (
        {"dataset.splits": "own", "dataset.split_file": "x.csv"},
        "dataset.split_file",
        "None with dataset.splits 'own'",
    ),
    (
        {"dataset.splits": "published", "dataset.tfds_split": "train"},
        "dataset.tfds_split",
        "None with dataset.splits",
    ),
]


def changed_default(fields: dict):
    config = default.get_config()
    with config.ignore_type():
        config.update_from_flattened_dict(fields)
    return config


@pytest.mark.parametrize("fields", ALLOWED, ids=str)
def test_a_value_is_allowed(fields):
    typed(changed_default(fields))


@pytest.mark.parametrize(("fields", "named", "allowed"), REFUSED, ids=str)
def test_a_bad_value_is_named_with_what_is_allowed(fields, named, allowed):
    with pytest.raises(UserError, match=rf"^{re.escape(f'{named}: {fields[named]!r}; allowed: ')}{allowed}"):
        typed(changed_default(fields))


@pytest.mark.parametrize(("fields", "limit"), [({}, 2**31 - 1), (ADASCALE, 2**24)])
def test_steps_that_the_training_state_cannot_count_are_refused(fields, limit):
    c = changed_default({**fields, "train.inner_steps": 1, "train.outer_steps": limit + 1})
    with pytest.raises(UserError, match=f"outer_steps: {limit + 1}; allowed: up to {limit}"):
        typed(c)


def test_a_network_that_there_is_not_is_named_with_those_there_are():
    known = dict.fromkeys(("a", "resnet8"), models.MODELS["resnet8"])
    message = r"^model\.name: 'resnet9'; allowed: a \| resnet8 \(did you mean 'resnet8'\?\)$"
    with pytest.raises(UserError, match=message):
        rules.check(changed_default({"model.name": "resnet9"}).to_dict(), known)


def test_all_problems_are_reported_at_once():
    c = changed_default({"batch.size": -3, "optimizer.name": "adm"}).unlock()
    c.optimizer.learing_rate = 0.1
    del c.seed
    with pytest.raises(UserError) as error:
        typed(c)
    text = str(error.value)
    for problem in (
        "batch.size: -3",
        "did you mean 'adam'?",
        "optimizer.learing_rate: unknown field (did you mean 'optimizer.learning_rate'?)",
        "seed: missing",
    ):
        assert problem in text
    assert "\n" not in text


# ---- the command line ---------------------------------------------------------------------------------


@pytest.fixture
def answer(monkeypatch, capsys):
    """answer(arguments): the exit code of a script with these arguments, its config, and its stderr."""

    def answer(*arguments):
        configs = []

        def main():
            configs.append(cli.parse_flags(sys.argv))
            typed(configs[0])

        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the config file of the call before
        try:
            with pytest.raises(SystemExit) as exit_, warnings.catch_warnings(action="ignore"):  # of config_flags
                cli.exit_after(main)
        finally:
            for name in [name for name in flags.FLAGS if name.startswith("config")]:
                delattr(flags.FLAGS, name)
        return exit_.value.code, configs[0] if configs else None, capsys.readouterr().err

    return answer


FILES = {  # config files that are none, each with what is said of it
    "empty": ("", "--config: the file cannot be run"),
    "raises": ("def get_config():\n    return 1 / 0\n", "ZeroDivisionError"),
    "called": ("def get_config(a, b):\n    pass\n", "TypeError: get_config() missing 2"),
    "number": ("def get_config():\n    return 3\n", "--config: "),
    "syntax": ("def get_config(:\n", "SyntaxError"),
    "import": ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
    "nested": (
        "from configs import default\n\ndef get_config():\n    default.get_config().nope.x = 1\n",
        "--config: the file cannot be run: AttributeError",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--config.optimizer.nam", "sgd"], "--config.optimizer.nam: unknown field", 2),
        (["--config.optimizer.lr", "0.1"], "did you mean 'optimizer.learning_rate'?", 2),
        (["--config.seed", "abc"], "seed: 'abc'; allowed: an integer", 2),
        (["--workdri", "x"], "workdri", 2),
        (["sgd"], "unexpected argument 'sgd'", 2),
        (["--config", "configs/nosuch.py"], "nosuch.py", 2),
        (["--config", "~no-such-user/x.py"], "--config: ~no-such-user/x.py: there is no home folder", 2),
        *((["--config", f"{name}.py"], message, 2) for name, (_, message) in FILES.items()),
        (["--config.batch.size=None"], "batch.size: None; allowed: an integer >= 1, or 'full'", 1),
    ],
)
def test_usage_errors_are_one_line_with_an_exit_code(arguments, message, code, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    found, _, stderr = answer(*arguments)
    assert found == code
    assert len(stderr.splitlines()) == 1
    assert message in stderr


@pytest.mark.parametrize("field", RULES)
def test_a_text_that_is_no_value_is_one_line_that_names_the_field(field, answer):
    text = next(text for text in ("x", "{", "[1, 2", "1e400x", "a/b", " ") if not RULES[field].allows(text))
    code, _, stderr = answer(f"--config.{field}={text}")
    assert code in (1, 2)
    assert len(stderr.splitlines()) == 1
    assert field in stderr


def test_fields_of_mixed_type_take_both_and_what_a_file_sets_may_be_taken_away(answer):
    for size in (["--config.batch.size", "512"], ["--config.batch.size=512"]):
        assert answer(*size)[1].batch.size == 512
    full = answer("--config", ROOT / "configs/eurosat.py", "--config.batch.size", "full")[1]
    assert full.batch.size == "full"
    fast = ["--config", ROOT / "configs/eurosat_muon.py"]
    assert answer(*fast)[1].schedule.warmup_steps == 67
    assert answer(*fast, "--config.schedule.warmup_steps", "None")[1].schedule.warmup_steps is None
    others = ["--config.schedule.warmup_steps=None", "--config.schedule.warmup_epochs=0.1"]
    assert answer(*fast, *others)[1].schedule.warmup_epochs == 0.1


def test_compiled_programs_are_kept_where_the_user_says_first(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        cli.use_compilation_cache(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == before == os.environ["JAX_COMPILATION_CACHE_DIR"]
        jax.config.update("jax_compilation_cache_dir", None)
        cli.use_compilation_cache(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        cli.use_compilation_cache("/of/a/study/that/someone/sent")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("optimizer.lr", "optimizer.learning_rate"), ("train.epochs", "train.outer_steps")),  # by aliases
        *(("bs", "batch.size"), ("optimizer.warmup_steps", "schedule.warmup_steps")),
        *(("train.learning_rate", "optimizer.learning_rate"), ("optimiser.b2", "optimizer.b2")),
        *(("optimizer.weigth_decay", "optimizer.weight_decay"), ("optimizer.eps", None), ("model.qqq", None)),
    ],
)
def test_the_field_that_was_meant_is_suggested(given, meant):
    assert nearest_field(given) == (f" (did you mean {meant!r}?)" if meant else "")


def test_aliases_are_no_fields_and_mean_fields():
    assert set(ALIASES.values()) <= RULES.keys()
    assert not ALIASES.keys() & {name.rpartition(".")[2] for name in RULES}


# ---- docs/config.md -----------------------------------------------------------------------------------


def test_the_page_has_every_field_as_it_is_stated():
    assert page.help_texts().keys() == RULES.keys()
    assert page.PAGE.read_text() == page.page()


def test_names_of_optimizers_are_those_there_are():
    assert set(RULES["optimizer.name"].text.split(" | ")) == set(OPTIMIZERS)
    assert set(RULES["task.name"].text.split(" | ")) == set(KINDS)
    tables = {"scaling": schedules.SCALING, "b2_scaling": schedules.B2_SCALING, "decay_by": DECAY_BY}
    for field, table in tables.items():
        assert set(RULES[f"schedule.{field}"].text.split(" | ")) == set(table)

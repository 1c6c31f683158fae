import importlib
import os
import re
import subprocess
import sys

import jax
import pytest
from conftest import ROOT, assert_one_line_error, run_script, typed

import model as models
from configs import default
from largebatch import cli
from largebatch.config import dicts, page, rules
from largebatch.config.dicts import RULES
from largebatch.config.rules import ALIASES, nearest_field
from largebatch.optim import schedules
from largebatch.optim.batch_schedule import DECAY_BY, resolve_batch_size
from largebatch.optim.optimizers import OPTIMIZERS
from largebatch.tasks.kinds import KINDS
from largebatch.util import UserError

BAD_FIELDS = {
    "dataset.source": "disk",
    "dataset.image_size": 4,
    "dataset.resize": "squash",
    "dataset.channels": 0,
    "dataset.split_seed": -1,
    "dataset.splits": "mine",
    "dataset.split_file": "",
    "dataset.tfds_split": " ",
    "augment.views": "some",
    "augment.storage": "both",
    "augment.crop_scale": 0.0,
    "augment.brightness": 1.1,
    "augment.contrast": -0.1,
    "augment.cutout": -1,
    "model.dtype": "float16",
    "model.conv": "winograd",
    "batch.size": 0,
    "batch.micro_batch_size": -4,
    "optimizer.name": "lambb",
    "optimizer.learning_rate": 0.0,
    "optimizer.momentum": 1.0,
    "optimizer.weight_decay": -0.1,
    "train.inner_steps": 0,
    "train.outer_steps": 0,
    "train.target_accuracy": 1.5,
    "eval.shift_average": -1,
    "devices.platform": "npu",
    "log.wandb_project": "a/b",
    "seed": -1,
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
    (
        {"devices.num_hosts": 2, "devices.host_index": 2},
        "devices.host_index",
        "0 to devices.num_hosts - 1",
    ),
    (
        {"augment.views": "none", "eval.view_average": True},
        "eval.view_average",
        "False with augment.views 'none'",
    ),
    ({"dataset.resize": "crop"}, "dataset.resize", "stretch without dataset.image_size"),
    (
        {**ADASCALE, "schedule.name": "step", "schedule.decay_steps": (2,), "schedule.decay_by": "batch"},
        "schedule.decay_by",
        "'rate' with schedule.scaling 'adascale'",
    ),
    (
        {"dataset.splits": "own", "dataset.split_file": "x.csv"},
        "dataset.split_file",
        "None with dataset.splits 'own'",
    ),
    (
        {"dataset.splits": "published", "dataset.tfds_split": "train+test"},
        "dataset.tfds_split",
        "None with dataset.splits 'published', which is not to be split by us",
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


def test_a_batch_is_no_larger_than_an_epoch():
    assert (resolve_batch_size("full", 640), resolve_batch_size(640, 640)) == (640, 640)
    with pytest.raises(UserError, match=r"batch.size: 641; allowed: an integer from 1 to 640"):
        resolve_batch_size(641, 640)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.optimizer.nam", "sgd"], "--config.optimizer.nam: unknown field"),
        (["--config.optimizer.lr", "0.1"], "did you mean 'optimizer.learning_rate'?"),
        (["--config.seed", "abc"], "seed: 'abc'; allowed: an integer"),
        (["--workdri", "x"], "workdri"),
        (["sgd"], "unexpected argument 'sgd'"),
        (["--config", "configs/nosuch.py"], "nosuch.py"),
        (["--config", "raises.py"], "ZeroDivisionError"),
        (["--config=called.py"], "TypeError: get_config() missing 2"),
    ],
)
def test_usage_errors_are_one_line_with_exit_code_2(arguments, message, tmp_path):
    (tmp_path / "raises.py").write_text("def get_config():\n    return 1 / 0\n")
    (tmp_path / "called.py").write_text("def get_config(a, b):\n    pass\n")
    result = run_script(ROOT / "train.py", *arguments, cwd=tmp_path)
    assert_one_line_error(result, message, code=2)


def parse(*arguments, field="batch.size") -> str:
    """A field as train.py would see it."""
    code = f"import sys; from largebatch import cli; print(repr(cli.parse_flags(['x', *sys.argv[1:]]).{field}))"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_fields_of_mixed_type_take_both():
    assert parse("--config.batch.size", "512") == "512"
    assert parse("--config.batch.size=512") == "512"
    assert parse("--config", "configs/eurosat.py", "--config.batch.size", "full") == "'full'"


def test_what_a_config_file_sets_may_be_taken_away():
    fast = ["--config", "configs/eurosat_muon.py"]
    assert parse(*fast, field="schedule.warmup_steps") == "67"
    assert parse(*fast, "--config.schedule.warmup_steps", "None", field="schedule.warmup_steps") == "None"
    others = ["--config.schedule.warmup_steps=None", "--config.schedule.warmup_epochs=0.1"]
    assert parse(*fast, *others, field="schedule.warmup_epochs") == "0.1"


def test_none_is_no_value_for_other_fields(tmp_path):
    result = run_script("train.py", "--config.batch.size=None", f"--workdir={tmp_path / 'run'}")
    assert_one_line_error(result, "batch.size: None; allowed: an integer >= 1, or 'full'")


def test_differences_name_the_fields():
    ours, theirs = {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}}
    names = ("here", "there")
    assert dicts.difference(ours, ours, names) == ""
    assert dicts.difference(ours, theirs, names) == "a.c: 2 here, 3 there; a.d: 'missing' here, 4 there"


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
    for field, table in (
        ("scaling", schedules.SCALING),
        ("b2_scaling", schedules.B2_SCALING),
        ("decay_by", DECAY_BY),
    ):
        assert set(RULES[f"schedule.{field}"].text.split(" | ")) == set(table)

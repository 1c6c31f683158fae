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


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_bad_value_is_named_with_what_is_allowed(field):
    c = default.get_config()
    with c.ignore_type():
        c.update_from_flattened_dict({field: BAD_FIELDS[field]})
    with pytest.raises(UserError) as error:
        typed(c)
    assert str(error.value).startswith(f"{field}: {BAD_FIELDS[field]!r}; allowed: {RULES[field].text}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer.b2", 0.99999999),  # 1 in float32, by which Adam divides zero by zero
        ("optimizer.momentum", 1 - 1e-9),
        ("train.ema_decay", 0.99999999),
        ("train.rollback_factor", 0.99999999),  # would cut nothing
        ("train.rollback_factor", 1e-46),
        ("optimizer.learning_rate", 1e-50),  # 0
        ("optimizer.learning_rate", 1e39),  # infinite
        ("optimizer.clip_norm", 1e-46),
        ("optimizer.weight_decay", float("inf")),
    ],
)
def test_a_number_that_float32_rounds_to_a_limit_is_refused(field, value):
    c = default.get_config()
    with c.ignore_type():
        c.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"^{re.escape(field)}: .*; allowed: a number .* in float32"):
        typed(c)


@pytest.mark.parametrize("size", [None, 8, 1024, (8, 12), [1024, 8]])
def test_an_image_size_is_a_square_or_height_and_width(size):
    c = default.get_config()
    c.dataset.image_size = size
    typed(c)


@pytest.mark.parametrize("size", [7, 1025, True, 8.0, "8", (8,), (8, 8, 3), (8, 7), (8, None)])
def test_other_image_sizes_are_refused(size):
    c = default.get_config()
    c.dataset.image_size = size
    with pytest.raises(UserError, match=r"dataset.image_size: .*; allowed: an integer from 8 to 1024, a tuple"):
        typed(c)


def test_the_numbers_next_to_a_limit_are_allowed():
    c = default.get_config()
    c.optimizer.b2, c.train.rollback_factor, c.optimizer.learning_rate = 0.9999999, 0.9999999, 1e-37
    c.optimizer.weight_decay, c.train.target_accuracy = 0.0, 1.0
    typed(c)


@pytest.mark.parametrize(
    ("fields", "limit"), [({}, 2**31 - 1), ({"schedule.scaling": "adascale", "optimizer.name": "sgd"}, 2**24)]
)
def test_updates_that_the_training_state_cannot_count_are_refused(fields, limit):
    c = default.get_config()
    c.update_from_flattened_dict(fields)
    c.train.inner_steps, c.train.outer_steps = 1, limit
    typed(c)
    c.train.outer_steps = limit + 1
    with pytest.raises(UserError, match=f"outer_steps: {limit + 1}; allowed: up to {limit}"):
        typed(c)


@pytest.mark.parametrize("value", [True, 1.5, "many", None])
def test_a_batch_size_is_an_integer_or_full(value):
    c = default.get_config()
    c.batch.size = value
    with pytest.raises(UserError, match=r"batch.size: .*an integer >= 1, or 'full'"):
        typed(c)


def test_a_network_that_there_is_not_is_named_with_those_there_are():
    c = default.get_config()
    c.model.name = "resnet9"
    with pytest.raises(
        UserError, match=r"^model\.name: 'resnet9'; allowed: a \| resnet8 \(did you mean 'resnet8'\?\)$"
    ):
        rules.check(c.to_dict(), dict.fromkeys(("a", "resnet8"), models.MODELS["resnet8"]))


def test_all_problems_are_reported_at_once():
    c = default.get_config()
    c.batch.size, c.optimizer.name, c.seed = -3, "adm", -1
    with pytest.raises(UserError) as error:
        typed(c)
    text = str(error.value)
    assert all(field in text for field in ("batch.size: -3", "optimizer.name: 'adm'", "seed: -1"))
    assert "did you mean 'adam'?" in text
    assert "\n" not in text


def test_unknown_and_missing_fields_are_named():
    c = default.get_config().unlock()
    c.optimizer.learing_rate = 0.1
    del c.seed
    with pytest.raises(UserError) as error:
        typed(c)
    assert "optimizer.learing_rate: unknown field (did you mean 'optimizer.learning_rate'?)" in str(error.value)
    assert "seed: missing" in str(error.value)


@pytest.mark.parametrize("address", ["10.0.0.1:1234", "node-7.cluster", ":1234", "[fe80::1]:80", "[::1]", None])
def test_a_part_of_a_meeting_place_is_allowed(address):
    c = default.get_config()
    c.devices.coordinator_address = address
    typed(c)
    c.devices.num_hosts = 2
    typed(c)


@pytest.mark.parametrize("address", ["", ":", "host:", "host:port", "host:70000", "host:0", "a b", "http://host:1"])
def test_what_is_no_address_is_refused(address):
    c = default.get_config()
    c.devices.coordinator_address = address
    with pytest.raises(UserError, match=r"devices.coordinator_address: '.*'; allowed: "):
        typed(c)


def test_a_host_that_is_not_among_the_hosts_is_refused():
    c = default.get_config()
    c.devices.num_hosts, c.devices.host_index = 2, 2
    with pytest.raises(UserError, match=r"devices.host_index: 2; allowed: 0 to devices.num_hosts - 1"):
        typed(c)


def test_one_view_has_no_mean():
    c = default.get_config()
    c.augment.views, c.eval.view_average = "none", True
    with pytest.raises(UserError, match=r"^eval\.view_average: True; allowed: False with augment\.views 'none'$"):
        typed(c)


def test_what_is_not_resized_is_not_cropped():
    c = default.get_config()
    c.dataset.resize = "crop"
    with pytest.raises(UserError, match=r"^dataset\.resize: 'crop'; allowed: stretch without dataset\.image_size$"):
        typed(c)
    c.dataset.image_size = 32
    typed(c)


def test_adascale_does_not_grow_the_batch_by_decay_steps():
    c = default.get_config()
    c.optimizer.name, c.schedule.scaling = "sgd", "adascale"
    c.schedule.name, c.schedule.decay_steps, c.schedule.decay_by = "step", (2,), "batch"
    with pytest.raises(UserError, match=r"decay_by: 'batch'; allowed: 'rate' with schedule.scaling 'adascale'"):
        typed(c)


def test_resolve_batch_size():
    assert resolve_batch_size("full", 640) == 640
    assert resolve_batch_size(640, 640) == 640
    with pytest.raises(UserError, match=r"batch.size: 641; allowed: an integer from 1 to 640"):
        resolve_batch_size(641, 640)


USAGE = {
    "unknown field": (["--config.optimizer.nam", "sgd"], "--config.optimizer.nam: unknown field"),
    "unknown group": (["--config.optimiser.name=sgd"], "did you mean 'optimizer.name'?"),
    "alias of a field": (["--config.optimizer.lr", "0.1"], "did you mean 'optimizer.learning_rate'?"),
    "text for a number": (["--config.seed", "abc"], "seed: 'abc'; allowed: an integer"),
    "text for a rate": (["--config.optimizer.learning_rate=abc"], "optimizer.learning_rate: 'abc'; allowed"),
    "unknown flag": (["--workdri", "x"], "workdri"),
    "stray argument": (["sgd"], "unexpected argument 'sgd'"),
    "no such config": (["--config", "configs/nosuch.py"], "nosuch.py"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_errors_are_one_line_with_exit_code_2(name):
    arguments, message = USAGE[name]
    assert_one_line_error(run_script("train.py", *arguments), message, code=2)


def test_a_config_file_that_raises_is_named(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def get_config():\n    return 1 / 0\n")
    assert_one_line_error(run_script("train.py", "--config", path), "ZeroDivisionError", code=2)


def test_a_config_file_that_is_called_wrongly_gives_no_traceback(tmp_path):
    (tmp_path / "config.py").write_text("def get_config(a, b):\n    pass\n")
    result = run_script("train.py", f"--config={tmp_path / 'config.py'}")
    assert_one_line_error(result, "--config", "TypeError: get_config() missing 2", code=2)


def parse(*arguments, field="batch.size") -> str:
    """A field as train.py would see it."""
    code = f"import sys; from largebatch import cli; print(repr(cli.parse_flags(['x', *sys.argv[1:]]).{field}))"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_fields_of_mixed_type_take_both():
    assert parse("--config.batch.size", "512") == "512"
    assert parse("--config.batch.size=512") == "512"
    assert parse("--config", "configs/eurosat.py", "--config.batch.size", "full") == "'full'"


@pytest.mark.parametrize(
    "given", [["--config.schedule.warmup_updates", "None"], ["--config.schedule.warmup_updates=None"]]
)
def test_what_a_config_file_sets_may_be_taken_away(given):
    fast = ["--config", "configs/eurosat_muon.py"]
    assert parse(*fast, field="schedule.warmup_updates") == "67"
    assert parse(*fast, *given, field="schedule.warmup_updates") == "None"
    assert parse(*fast, *given, "--config.schedule.warmup_epochs=0.1", field="schedule.warmup_epochs") == "0.1"


def test_none_is_no_value_for_other_fields(tmp_path):
    result = run_script("train.py", "--config.batch.size=None", f"--workdir={tmp_path / 'run'}")
    assert_one_line_error(result, "batch.size: None; allowed: an integer >= 1, or 'full'")


def test_differences_name_the_fields():
    ours, theirs = {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3, "d": 4}}
    names = ("here", "there")
    assert dicts.difference(ours, ours, names) == ""
    assert dicts.difference(ours, theirs, names) == "a.c: 2 here, 3 there; a.d: 'missing' here, 4 there"


def test_a_config_with_another_field_is_another_config():
    ours, stored = default.get_config().to_dict(), default.get_config().to_dict()
    ours["train"]["new_field"] = 1
    changed = dicts.difference(dicts.identity(ours), dicts.identity(stored), ("here", "there"))
    assert changed == "train.new_field: 1 here, 'missing' there"


def test_splits_that_are_given_but_not_taken_are_refused():
    def problem(**dataset) -> str:
        config = default.get_config()
        config.dataset.update(dataset)
        try:
            typed(config)
        except UserError as error:
            return str(error)
        return ""

    assert problem(splits="own", split_file="x.csv") == (
        "dataset.split_file: 'x.csv'; allowed: None with dataset.splits 'own'"
    )
    assert problem(splits="published", tfds_split="train+test") == (
        "dataset.tfds_split: 'train+test'; allowed: None with dataset.splits 'published', which is not to be split "
        "by us"
    )
    assert not problem(splits="published", split_file="x-{split}.csv", tfds_split="train+test")
    assert not problem(splits="auto", split_file="x.csv")
    assert not problem(splits="own", tfds_split="train")


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
        *(("optimizer.lr", "optimizer.learning_rate"), ("lr", "optimizer.learning_rate")),
        *(("train.lr", "optimizer.learning_rate"), ("optimizer.wd", "optimizer.weight_decay")),
        *(("train.epochs", "train.outer_steps"), ("epochs", "train.outer_steps")),
        *(("train.steps", "train.inner_steps"), ("train.batch_size", "batch.size"), ("bs", "batch.size")),
        *(("optimizer.beta1", "optimizer.momentum"), ("optimizer.beta2", "optimizer.b2")),
        *(
            ("train.learning_rate", "optimizer.learning_rate"),
            ("optimizer.warmup_steps", "schedule.warmup_updates"),
        ),
        *(("optimizer.weigth_decay", "optimizer.weight_decay"), ("optimiser.b2", "optimizer.b2")),
        *(("optimizer.eps", None), ("model.qqq", None)),
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

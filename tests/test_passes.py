"""The config for a user's own images: its length follows from how many there are."""

import json

import pytest
from conftest import facts_of, make_folder, typed

import train
from configs import own_images
from largebatch.hardware.chips import Hardware
from largebatch.util import BadSetting, UserError
from plan import plan_run

SMALL = {
    "dataset.image_size": 16,
    "batch.size": 24,
    "batch.ghost_size": None,
    "train.outer_steps": 2,
    "model.name": "convnet",
    "model.norm": "none",
    "augment.shift": 0,
}


def test_an_outer_loop_is_a_pass_over_the_images(tmp_path, session_cache):
    config = own_images.get_config()
    config.update_from_flattened_dict(SMALL)
    config.dataset.path = str(make_folder(tmp_path / "pets", {"cat": 50, "dog": 50}))
    config.augment.cache_dir = str(session_cache)
    train.train_and_evaluate(config, str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # 80 training images: 3 steps of 24 are less than a pass, 4 are more.
    assert [(row["step"], row["outer"], row["examples_seen"]) for row in rows] == [(4, 1, 96), (8, 2, 192)]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["inner_steps"] == "pass"
    config.batch.size = 200
    with pytest.raises(BadSetting, match=r"batch\.size: 200; allowed: an integer from 1 to 160"):
        train.train_and_evaluate(config, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("num_images", "batch_size", "steps"), [(100, 25, 4), (101, 25, 5), (30, 60, 1), (30, "full", 1)]
)
def test_updates_of_a_pass(num_images, batch_size, steps):
    config = own_images.get_config()
    config.batch.size = batch_size
    config.model.dtype = "float32"
    plan = plan_run(typed(config), facts_of(num_images, (16, 16, 3)), Hardware("cpu", "cpu", 1))
    assert plan.config.train.inner_steps == steps
    assert plan.schedule.num_steps == 20 * steps
    assert config.train.inner_steps == "pass"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch.trace", (8, 16)),
        ("batch.auto", True),
        ("batch.per_device_batch_size", 8),
        ("schedule.decay_by", "seesaw"),
    ],
)
def test_a_pass_has_no_length_where_the_batch_changes(field, value):
    config = own_images.get_config()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"train\.inner_steps: 'pass'; allowed: an integer .* with {field}"):
        typed(config)


def test_what_needs_the_number_of_updates_is_checked_once_it_is_known():
    config = own_images.get_config()
    config.model.dtype = "float32"
    config.schedule.warmup_epochs, config.schedule.warmup_steps = None, 90
    typed(config)
    hardware = Hardware("cpu", "cpu", 1)
    plan_run(typed(config), facts_of(1000, (16, 16, 3)), hardware)  # 160 steps
    with pytest.raises(BadSetting, match=r"schedule\.warmup_steps: 90; allowed: fewer than the run's 80 steps"):
        plan_run(typed(config), facts_of(500, (16, 16, 3)), hardware)

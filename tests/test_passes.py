"""The config for a user's own images: its length follows from how many there are."""

import pytest
from conftest import facts_of, typed

from configs import own_images
from largebatch.hardware.chips import Hardware
from largebatch.util import BadSetting, UserError
from plan import plan_run


@pytest.mark.parametrize(
    ("num_images", "batch_size", "steps"), [(100, 25, 4), (101, 25, 5), (30, 60, 1), (30, "full", 1)]
)
def test_steps_of_a_pass(num_images, batch_size, steps):
    config = own_images.get_config()
    config.batch.size = batch_size
    config.model.dtype = "float32"
    plan = plan_run(typed(config), facts_of(num_images, (16, 16, 3)), Hardware("cpu", "cpu", 1))
    assert plan.config.train.inner_steps == steps
    assert plan.schedule.num_steps == 20 * steps
    assert config.train.inner_steps == "pass"


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch.trace", (8, 16)), ("batch.auto", True), ("schedule.decay_by", "seesaw")],
)
def test_a_pass_has_no_length_where_the_batch_changes(field, value):
    config = own_images.get_config()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=rf"train\.inner_steps: 'pass'; allowed: an integer .* with {field}"):
        typed(config)


def test_what_needs_the_number_of_steps_is_checked_once_it_is_known():
    config = own_images.get_config()
    config.model.dtype = "float32"
    config.schedule.warmup_epochs, config.schedule.warmup_steps = None, 90
    typed(config)
    hardware = Hardware("cpu", "cpu", 1)
    plan_run(typed(config), facts_of(1000, (16, 16, 3)), hardware)  # 160 steps
    with pytest.raises(BadSetting, match=r"schedule\.warmup_steps: 90; allowed: fewer than the run's 80 steps"):
        plan_run(typed(config), facts_of(500, (16, 16, 3)), hardware)

"""Rates and batch sizes against values worked out by hand."""

import numpy as np
import pytest

from largebatch.config.fields import ScheduleConfig
from largebatch.optim.batch_schedule import BatchSchedule
from largebatch.optim.schedule_text import describe_schedule
from largebatch.optim.schedules import create_schedule, epoch_and_offset
from largebatch.util import BadSetting

EPOCH = 172_800


def create(num_steps=100, batch_size=512, epoch_size=EPOCH, **fields):
    """The schedule of a base rate of 0.1 and one batch size."""
    return create_schedule(ScheduleConfig(**fields), 0.1, num_steps, BatchSchedule.constant(batch_size), epoch_size)


def rates(schedule, *steps):
    return schedule.learning_rates(np.array(steps)).tolist()


# ---- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "steps", "expected"),
    [
        ({}, (0, 50, 99), [0.1, 0.1, 0.1]),
        # Warm-up ends at the peak and wastes no step.
        ({"warmup_steps": 10}, (0, 4, 9, 10, 99), [0.01, 0.05, 0.1, 0.1, 0.1]),
        # 90 steps after the warm-up: the first has the peak, the last a 90th of it.
        ({"name": "linear", "warmup_steps": 10}, (9, 10, 55, 99), [0.1, 0.1, 0.05, 0.1 / 90]),
        ({"name": "linear", "final_fraction": 0.2}, (0, 50), [0.1, 0.1 * (1 - 0.8 * 0.5)]),
        (
            {"name": "cosine", "warmup_steps": 20},
            (19, 20, 40, 60, 80, 99),
            [0.1, 0.1, *(0.05 * (1 + np.cos(np.pi * p)) for p in (0.25, 0.5, 0.75, 79 / 80))],
        ),
        ({"name": "cosine", "final_fraction": 0.1}, (50,), [0.01 + 0.09 / 2]),
        (
            {"name": "step", "decay_steps": (30, 60), "decay_factor": 0.5, "warmup_steps": 5},
            (0, 4, 29, 30, 59, 60, 99),
            [0.02, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025],
        ),
        # 51,200 examples are 100 steps of 512; half an epoch of 25,600 is 25.
        ({"num_steps": 400, "warmup_examples": 51_200}, (0, 99), [0.001, 0.1]),
        ({"epoch_size": 25_599, "warmup_epochs": 0.5}, (0, 23, 24), [0.1 / 25, 0.1 * 24 / 25, 0.1]),
    ],
)
def test_rates(fields, steps, expected):
    schedule = create(**fields)
    np.testing.assert_allclose(rates(schedule, *steps), expected)
    assert schedule.batch_sizes.at(np.arange(100)).tolist() == [512] * 100


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_decay_over_images_goes_by_what_a_trace_has_seen(name):
    sizes = np.array([128] * 60 + [1024] * 40)
    trace = BatchSchedule(np.array([0, 60]), np.array([128, 1024]))
    options = ScheduleConfig(name=name, decay_over="images", warmup_steps=10, final_fraction=0.2)
    schedule = create_schedule(options, 0.1, 100, trace, 4096)
    seen = np.cumsum(sizes) - sizes
    done = (seen - seen[10]) / (sizes.sum() - seen[10])
    left = {"linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[name]
    by_update = schedule.learning_rates(np.arange(100))
    np.testing.assert_allclose(by_update[10:], 0.1 * (0.2 + 0.8 * left)[10:], rtol=1e-12)
    assert f"{name} over images to 0.02 at step 100" in describe_schedule(schedule)


def test_a_batch_that_shrinks_within_the_warm_up_goes_on_from_the_lower_rate():
    options = ScheduleConfig(scaling="linear", reference_batch_size=128, warmup_steps=100)
    sizes = BatchSchedule(np.array([0, 80, 90]), np.array([1024, 128, 1024]), "noise")
    found = create_schedule(options, 0.1, 200, sizes, 128_000).learning_rates(np.arange(101))
    np.testing.assert_allclose(found[:80], 0.1 + 0.7 * np.arange(1, 81) / 100)
    np.testing.assert_allclose(found[80:90], 0.1)
    np.testing.assert_allclose(found[90:], [*(0.1 + 0.7 * np.arange(1, 11) / 10), 0.8])


# ---- scaling with the batch size --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "batch_size", "factor"),
    [("none", 2048, 1), ("linear", 2048, 4), ("sqrt", 2048, 2), ("linear", 128, 0.25), ("sqrt", 128, 0.5)],
)
def test_scaling_rules(scaling, batch_size, factor):
    schedule = create(scaling=scaling, batch_size=batch_size, warmup_steps=4)
    np.testing.assert_allclose(rates(schedule, 50), [0.1 * factor])
    start = 0.1 if factor > 1 else 0.0
    np.testing.assert_allclose(rates(schedule, 0), [start + (0.1 * factor - start) / 4])


def test_a_warm_up_has_no_jump_where_a_changing_batch_crosses_the_reference():
    options = ScheduleConfig(scaling="linear", reference_batch_size=512, warmup_steps=50)
    trace = BatchSchedule(np.arange(100), np.resize([512, 513, 256, 1024], 100))
    schedule = create_schedule(options, 0.1, 100, trace, 4096)
    by_update = schedule.learning_rates(np.arange(100))
    # Peaks are 0.1 and about that, 0.05 and 0.2. All start from 0.1, but for what has a lower peak.
    np.testing.assert_allclose(by_update[:4], [0.1, 0.1 + 0.1 / 512 * 2 / 50, 0.05, 0.1 + 0.1 * 4 / 50], rtol=1e-12)
    np.testing.assert_allclose(by_update[48:52], [0.1, 0.1 * 513 / 512, 0.05, 0.2], rtol=1e-12)
    assert "reached from 0.05 to 0.1 in 50 steps" in describe_schedule(schedule)


@pytest.mark.parametrize(
    ("scaling", "warmup", "first_size"),
    [
        ("linear", {"warmup_steps": 100}, 128),
        ("sqrt", {"warmup_examples": 12_800}, 128),
        ("linear", {"warmup_examples": 12_800}, 512),
    ],
)
def test_a_batch_that_grows_within_the_warm_up_changes_no_rate_at_once(scaling, warmup, first_size):
    """The base rate is 0.1 at 128; the batch doubles with steps 20 and 50, and once more after the warm-up.

    An epoch has 128,000 examples, so all three warm-ups are 100 steps of 128; of 512 the last two are 25.
    """
    options = ScheduleConfig(scaling=scaling, reference_batch_size=128, **warmup)
    length = 100 if first_size == 128 or "warmup_steps" in warmup else 25
    sizes = first_size * np.array([1, 2, 4, 8])
    starts = np.array([0, length // 5, length // 2, 2 * length])
    base = 0.1 if first_size > 128 else 0.0  # Goyal et al.: from the unscaled rate, where the rule raises it
    rate, expected = base, []
    for step in range(3 * length):
        ratio = sizes[np.searchsorted(starts, step, side="right") - 1] / 128
        peak = 0.1 * (ratio if scaling == "linear" else ratio**0.5)
        rate = peak if step >= length else rate + (peak - rate) / (length - step)
        expected.append(rate)
    actual = []
    for step in range(3 * length):  # as a run asks: by what has grown until then
        so_far = BatchSchedule(starts[starts <= step], sizes[: (starts <= step).sum()], "noise")
        schedule = create_schedule(options, 0.1, 3 * length, so_far, 128_000)
        actual.append(schedule.learning_rate_at(step))
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    within = np.diff([base, *actual[:length]])
    assert within.max() < 0.1 * sizes[2] / 128 / (length / 2)  # the steepest ramp there may be
    assert schedule.learning_rates(np.arange(3 * length)).tolist() == pytest.approx(expected)  # what was done stays


# ---- batch growth -----------------------------------------------------------------------------------


def test_growth_visits_as_many_examples_as_decay_in_fewer_updates():
    """Smith et al. 2018: the batch times 5 wherever the rate would have been cut to a fifth."""
    fields = {"name": "step", "decay_steps": (50, 75), "decay_factor": 0.2}
    decay, growth = create(**fields), create(decay_by="batch", **fields)
    assert (decay.num_steps, growth.num_steps) == (100, 50 + 5 + 1)
    steps = np.arange(growth.num_steps)
    assert growth.batch_sizes.at(steps).tolist() == [512] * 50 + [2560] * 5 + [12_800]
    np.testing.assert_allclose(growth.learning_rates(steps), [0.1] * 56)
    assert decay.examples_before(75) == growth.examples_before(55) == 75 * 512
    assert growth.max_batch_size == 12_800
    stages = "batch 512 from step 0 at 0.1, 2,560 from step 50 at 0.1, 12,800 from step 55 at 0.1"
    assert stages in describe_schedule(growth)


def test_growth_beyond_the_data_set_cuts_the_rate_by_the_rest():
    fields = {"name": "step", "decay_steps": (50, 75), "decay_factor": 0.2, "decay_by": "batch"}
    schedule = create(batch_size=512, epoch_size=5120, **fields)
    assert schedule.batch_sizes.values.tolist() == [512, 2560, 5120]  # in place of 12,800
    at_starts_and_end = rates(schedule, 0, 50, 55, schedule.num_steps - 1)
    np.testing.assert_allclose(at_starts_and_end, [0.1, 0.1, 0.1 * 5120 / 12_800, 0.1 * 5120 / 12_800])
    assert schedule.num_steps == 50 + 5 + 3  # 25 x 512 examples by 5,120, rounded up


@pytest.mark.parametrize(("name", "factor"), [("linear", 0.5), ("cosine", 0.9)])
def test_seesaw_follows_its_paper(name, factor):
    """Meterez et al. 2025, algorithm 1: where the rate would have fallen by c, it falls by the root of c, and the
    batch grows by 1 / c."""
    fields = {"num_steps": 400, "name": name, "warmup_steps": 40}
    baseline = create(**fields).learning_rates(np.arange(400)) / 0.1
    schedule = create(decay_by="seesaw", decay_factor=factor, **fields)
    num_stages, seen, expected = len(schedule.batch_sizes.values), 0, []
    while seen < 400 * 512:
        of_baseline = seen // 512  # the baseline's step that has seen as much
        falls = 0
        while falls + 1 < num_stages and of_baseline >= 40 and baseline[of_baseline] <= factor ** (falls + 1):
            falls += 1
        rate = 0.1 * factor ** (falls / 2) * min((len(expected) + 1) / 40, 1)
        expected.append((round(512 / factor**falls), rate))
        seen += expected[-1][0]
    steps = np.arange(schedule.num_steps)
    sizes, by_hand = np.array(expected).T
    np.testing.assert_array_equal(schedule.batch_sizes.at(steps), sizes)
    np.testing.assert_allclose(schedule.learning_rates(steps), by_hand, rtol=2e-3)  # sizes are whole numbers
    assert seen == schedule.examples_before(schedule.num_steps)
    assert 400 * 512 <= seen < 400 * 512 + sizes[-1]
    assert num_stages > 3
    text = f"with a growing batch for a {name} decay by steps of x {factor}: batch 512 from step 0 at 0.1, "
    assert text in describe_schedule(schedule)


@pytest.mark.parametrize(("size", "b2"), [(512, 0.99), (1024, 0.99**2), (128, 0.99**0.25)])
def test_b2_keeps_its_half_life_in_examples(size, b2):
    options = ScheduleConfig(b2_scaling="half_life")
    schedule = create_schedule(options, 0.1, 100, BatchSchedule.constant(size), EPOCH, b2=0.99)
    np.testing.assert_allclose(schedule.inputs(3, 2).b2, b2, rtol=1e-6)
    examples = np.log(0.5) / np.log(0.99) * 512
    assert b2 ** (examples / size) == pytest.approx(0.5)
    half = f"b2 {b2:g}: half of the second moment is of the last {examples:,.0f} images"
    assert half in describe_schedule(schedule)


def test_a_b2_that_float32_rounds_is_refused():
    options = ScheduleConfig(b2_scaling="half_life", reference_batch_size=4096)
    with pytest.raises(
        BadSetting, match=r"schedule.b2_scaling: 'half_life' makes b2 0.9999999756 at batch 1, which"
    ):
        create_schedule(options, 0.1, 100, BatchSchedule(np.array([0, 5]), np.array([64, 1])), EPOCH, b2=0.9999)
    create_schedule(options, 0.1, 100, BatchSchedule.constant(64), EPOCH, b2=0.9999)


def test_a_stage_without_an_update_is_left_out():
    schedule = create(name="step", decay_steps=(50, 51, 52), decay_factor=0.1, decay_by="batch")
    assert (np.diff(schedule.batch_sizes.starts) > 0).all()
    assert schedule.batch_sizes.starts[-1] < schedule.num_steps
    assert f"from step {schedule.num_steps:,}" not in describe_schedule(schedule)


def test_stages_against_plain_sums():
    starts, values = np.array([0, 3, 4, 9]), np.array([64, 7, 1024, 50])
    stages, sizes = BatchSchedule(starts, values), np.array([64] * 3 + [7] + [1024] * 5 + [50] * 191)
    before, steps = np.concatenate([[0], np.cumsum(sizes)]), np.arange(200)
    np.testing.assert_array_equal(stages.at(steps), sizes)
    np.testing.assert_array_equal(stages.total_before(np.arange(201)), before)
    totals = np.arange(1, before[-1] + 1, 13)
    np.testing.assert_array_equal(stages.steps_to(totals), np.searchsorted(before, totals))
    assert stages.first(9).starts.tolist() == [0, 3, 4]
    assert stages.changed_from(4, 5).at(steps[:12]).tolist() == [64] * 3 + [7] + [5] * 8
    many = BatchSchedule(np.array([0]), np.array([EPOCH]))
    assert many.total_before(np.int64(10**9)) == 10**9 * EPOCH  # beyond 32 bits


def test_epoch_and_offset_do_not_overflow():
    epoch, offset = epoch_and_offset(np.array([10**12 + 17]), EPOCH)
    assert epoch.dtype == offset.dtype == np.int32
    assert int(epoch[0]) * EPOCH + int(offset[0]) == 10**12 + 17


def test_a_call_in_the_middle_of_a_run_gets_its_own_rates_sizes_and_places():
    fields = {"name": "step", "decay_steps": (50, 75), "decay_factor": 0.2, "decay_by": "batch"}
    schedule = create(epoch_size=4800, warmup_steps=20, **fields)
    inputs = schedule.inputs(48, 8)
    assert inputs.batch_size.tolist() == [512, 512, 2560, 2560, 2560, 2560, 2560, 4800]
    np.testing.assert_allclose(inputs.learning_rate, [0.1] * 7 + [0.1 * 4800 / 12_800], rtol=1e-6)
    before = 48 * 512 + np.concatenate([[0], np.cumsum(inputs.batch_size[:-1])])
    np.testing.assert_array_equal(inputs.epoch * 4800 + inputs.offset, before)
    assert schedule.inputs(2, 4).learning_rate[0] == np.float32(0.1 * 3 / 20)

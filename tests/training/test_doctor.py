"""The doctor: a sound config is sound, and what is wrong is named with what to change."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import run_script, typed

import examine
from build import Prepared, ProgramCache, prepare
from largebatch import doctor
from largebatch.hosts.clock import Clock
from largebatch.training.loss import make_loss_fn
from largebatch.util import UserError


def prepared(config, programs: ProgramCache | None = None) -> Prepared:
    return prepare(examine.config_to_examine(typed(config)), Clock(), programs or ProgramCache())


@pytest.fixture
def quick(small_config, monkeypatch):
    """One micro-batch size."""
    monkeypatch.setattr(doctor, "BUDGET_SEC", 0.0)
    return small_config


@pytest.mark.full
def test_a_sound_config_is_sound(quick, tmp_path, monkeypatch):
    quick.augment.cache_dir = str(tmp_path)  # of no other test, whose cache would need no build
    quick.augment.storage = "streamed"
    shown = []
    monkeypatch.setattr(doctor, "show", lambda findings, *ending: shown.extend(findings))
    assert examine.run(quick, here=True, target_name=None) == 0
    assert [(finding.status, finding.name) for finding in shown] == [
        ("ok", name) for name in ("cache", "memory", "first step", "micro-batch", "time")
    ]
    assert shown[2].text.startswith("0.01 (")  # LAMB moves every layer by the learning rate times its norm


@pytest.mark.full
def test_a_layer_without_a_gradient_is_named(quick, monkeypatch):
    quick.optimizer.name = "adam"

    def without_one(*arguments):
        loss_fn = make_loss_fn(*arguments)
        return lambda params, *rest: loss_fn(params | {"Conv_1": jax.lax.stop_gradient(params["Conv_1"])}, *rest)

    monkeypatch.setattr("build.make_loss_fn", without_one)
    finding = doctor.check_first_step(prepared(quick))
    assert (finding.status, "Conv_1.kernel gets no gradient" in finding.advice) == ("warn", True)


@pytest.mark.full
def test_rates_out_of_range_are_named(quick):
    quick.optimizer.name = "adam"
    programs = ProgramCache()
    run = prepared(quick, programs)

    def finding_at(learning_rate):
        config = quick.copy_and_resolve_references()
        config.optimizer.learning_rate = learning_rate
        return doctor.check_first_step(run._replace(plan=programs.load(typed(config)).plan))

    assert (finding_at(0.01).status, "is high: try" in finding_at(0.01).advice) == ("warn", True)
    assert finding_at(1e3).status == "fail"
    assert (finding_at(1e-9).status, "is low" in finding_at(1e-9).advice) == ("warn", True)


# ---- micro-batches --------------------------------------------------------------------------------------


def test_a_faster_micro_batch_size_is_recommended(small_config):
    plan = SimpleNamespace(micro_batch_size=16, config=small_config)
    assert doctor.check_micro_batch(plan, {16: 1e-3, 8: 2e-3, 32: 0.95e-3}).status == "ok"
    finding = doctor.check_micro_batch(plan, {16: 1e-3, 8: 2e-3, 32: 0.5e-3})
    assert (finding.status, finding.advice) == ("warn", "set batch.micro_batch_size 32")
    assert finding.text == "16 fits; images/s in float32 at size 8: 500, 16: 1,000, 32: 2,000"


@pytest.mark.full
def test_half_and_twice_of_a_size_are_timed(small_config, monkeypatch):
    monkeypatch.setattr(doctor, "BUDGET_SEC", np.inf)
    small_config.batch.size, small_config.batch.micro_batch_size = 256, 8
    run = prepared(small_config)
    timings = doctor.time_micro_batches(run, examine.loops_by_size(run), 0.0)
    assert list(timings) == [8, 4, 16]
    assert all(0 < seconds < 1 for seconds in timings.values())


def test_sizes_that_are_another_training_are_not_tried(small_config):
    """With batch normalisation over micro-batches; ghost batches stay whole."""

    def sizes(**batch):
        config = typed(small_config).replace(model={"norm": "batch"}, batch={"size": 256, **batch})
        run = SimpleNamespace(plan=ProgramCache().load(config).plan, programs=SimpleNamespace(inner_loop=None))
        return list(examine.loops_by_size(run))

    assert sizes(micro_batch_size=8) == [8]
    assert sizes(micro_batch_size=8, ghost_size=8) == [8, 16]
    assert sizes(micro_batch_size=8, ghost_size=4) == [8, 4, 16]


def test_a_size_that_does_not_fit_is_left_out_but_the_run_s_own_is_told(small_config, monkeypatch):
    def does_not_fit(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    run = prepared(small_config)
    own = run.plan.micro_batch_size
    timings = doctor.time_micro_batches(run, {own: run.programs.inner_loop, 2 * own: does_not_fit}, 1e12)
    assert list(timings) == [own]
    monkeypatch.setattr(examine, "loops_by_size", lambda run: {own: does_not_fit})
    with pytest.raises(
        UserError, match=r"^does not fit on these devices: 'RESOURCE_.*smaller batch.micro_batch_size"
    ):
        examine.run(small_config, here=True, target_name=None)


# ---- the command ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_command_exits_by_what_it_found(tmp_path, session_cache):
    """On three devices, of which two hold 27 of the 80 originals and one 26: less than a micro-batch."""
    fields = {"augment.cache_dir": session_cache, "dataset.num_examples": 100, "dataset.image_size": 8}
    fields |= {"batch.micro_batch_size": 512, "train.inner_steps": 2}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    arguments += ["--doctor", f"--workdir={tmp_path / 'run'}"]
    three = {"JAX_NUM_CPU_DEVICES": "3"}
    wrong = ["--config.optimizer.name=sgd", "--config.optimizer.learning_rate=1e6"]
    result = run_script("train.py", *arguments, *wrong, env=three)
    assert result.returncode == 1
    assert result.stdout.count(" fail ") == 1
    # Before the cache is built two lines say what it and the images take.
    assert result.stdout.count(" ok ") == 4 - result.stdout.count(" warn ")
    assert "-> optimizer.learning_rate 1e+06 is far too high" in result.stdout
    assert result.stderr.splitlines()[-1] == "train.py: error: the doctor found what would fail; see above"
    assert not (tmp_path / "run").exists()

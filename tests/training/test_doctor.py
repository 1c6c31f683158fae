import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import run_script, typed

import examine as examination
from build import ProgramCache, prepare
from largebatch.doctor import checks as doctor
from largebatch.doctor.findings import check_memory
from largebatch.hosts import memory, replicas
from largebatch.hosts.clock import Clock
from largebatch.training.loss import make_loss_fn
from largebatch.training.state import TrainState


def prepare_examination(config, programs: ProgramCache | None = None) -> tuple[doctor.Subject, TrainState]:
    *subject, state = prepare(examination.config_to_examine(typed(config)), Clock(), programs or ProgramCache())
    return doctor.Subject(*subject), state


def examine(config) -> list[doctor.Finding]:
    subject, state = prepare_examination(config)
    return doctor.examine(subject, state, config.sync, time.perf_counter())


def findings_by_name(config) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in examine(config)}


@pytest.fixture
def quick(small_config, monkeypatch):
    """One micro-batch size."""
    monkeypatch.setattr(doctor, "BUDGET_SEC", 0.0)
    return small_config


@pytest.mark.full
def test_a_sound_config_is_sound(quick, monkeypatch, capsys):
    findings = findings_by_name(quick)
    assert {finding.status for finding in findings.values()} == {"ok"}, findings
    assert list(findings) == [
        "first update", "trust ratio", "micro-batch", "learning rate", "time", "traffic",
    ]  # fmt: skip
    # LAMB moves every layer by the learning rate times its norm.
    assert findings["first update"].text.startswith("0.01 (")
    monkeypatch.setattr(doctor, "examine", lambda *arguments: list(findings.values()))
    assert examination.run(quick, here=True, target_name=None) == 0
    assert capsys.readouterr().out.count(" ok ") == 7


@pytest.mark.full
def test_local_steps_are_looked_at_as_synchronous_ones(quick):
    quick.sync.mode, quick.sync.every = "local", 8
    findings = findings_by_name(quick)
    assert "from update 0 on, parameters and more every 8 updates instead" in findings["traffic"].text


@pytest.mark.full
def test_a_layer_without_a_gradient_is_named(quick, monkeypatch):
    quick.optimizer.weight_decay = 0.5  # by which it moves all the same

    def without_one(*arguments):
        loss_fn = make_loss_fn(*arguments)
        return lambda params, *rest: loss_fn(params | {"Conv_1": jax.lax.stop_gradient(params["Conv_1"])}, *rest)

    monkeypatch.setattr("build.make_loss_fn", without_one)
    subject, state = prepare_examination(quick, ProgramCache())  # not for other tests
    start = replicas.first_replica(state)
    gradient = doctor.plain_gradient(subject, start)
    finding = doctor.check_trust_ratios(gradient, start.params, quick.optimizer.weight_decay)
    assert (finding.status, finding.advice) == ("warn", "no gradient reaches Conv_1.kernel")


def test_trust_ratios_out_of_range_are_named():
    params = {"low": np.full((2, 2), 1e-5, np.float32), "good": np.ones((2, 2), np.float32)}
    gradient = {"low": np.ones((2, 2), np.float32), "good": np.ones((2, 2), np.float32)}
    finding = doctor.check_trust_ratios(gradient, params, 0.0)
    assert (finding.status, "1e-05 (low) to 1 (good)" in finding.text) == ("warn", True)
    params["low"] *= 1e4
    assert doctor.check_trust_ratios(gradient, params, 0.0).status == "ok"
    assert "0.67 (good)" in doctor.check_trust_ratios(gradient, params, 0.5).text  # 1 / (1 + 0.5)
    gradient["low"] = np.full((2, 2), 1e-9, np.float32)  # lost beside LAMB's epsilon
    finding = doctor.check_trust_ratios(gradient, params, 0.0)
    assert (finding.status, "1e+02 (low)" in finding.text) == ("warn", True)


@pytest.mark.full
def test_rates_out_of_range_are_named(quick):
    quick.optimizer.name = "adam"
    programs = ProgramCache()
    subject, state = prepare_examination(quick, programs)

    def finding_at(learning_rate):
        config = quick.copy_and_resolve_references()
        config.optimizer.learning_rate = learning_rate
        changed = subject._replace(plan=programs.load(typed(config)).plan)
        return doctor.check_update(changed, replicas.first_replica(state))

    assert (finding_at(0.01).status, "is high: try" in finding_at(0.01).advice) == ("warn", True)
    assert finding_at(1e3).status == "fail"
    assert (finding_at(1e-9).status, "is low" in finding_at(1e-9).advice) == ("warn", True)


def test_a_faster_micro_batch_size_is_recommended(small_config):
    network, config = SimpleNamespace(norm="none"), small_config
    plan, programs = SimpleNamespace(micro_batch_size=16, config=config), SimpleNamespace(network=network)
    subject = doctor.Subject(plan, None, programs)

    def finding_after(seconds_by_size):
        timings = {
            size: doctor._SizeTiming(loop=None, state=None, seconds=seconds)
            for size, seconds in seconds_by_size.items()
        }
        return doctor.check_micro_batch(subject, timings)

    assert finding_after({16: 1e-3, 8: 2e-3, 32: 0.95e-3}).status == "ok"
    finding = finding_after({16: 1e-3, 8: 2e-3, 32: 0.5e-3})
    assert (finding.status, finding.advice) == ("warn", "set batch.micro_batch_size 32")
    assert finding.text == "16 fits; images/s in float32 at size 8: 500, 16: 1,000, 32: 2,000"
    network.norm = "batch"  # whose size is not only a matter of speed
    assert finding_after({16: 1e-3, 32: 0.5e-3}).status == "ok"
    small_config.batch.ghost_size = 16  # another size is the same normalisation then
    assert finding_after({16: 1e-3, 32: 0.5e-3}).advice == "set batch.micro_batch_size 32"
    small_config.batch.ghost_size = None
    out_of_memory = doctor._SizeTiming(loop=None, state=None, error="RESOURCE_EXHAUSTED: out of memory")
    finding = doctor.check_micro_batch(subject, {16: out_of_memory})
    assert (finding.status, finding.advice) == ("fail", "set batch.micro_batch_size 8")


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
    # No trust ratio; before the cache is built two lines say what it and the images take.
    assert result.stdout.count(" ok ") == 6 - result.stdout.count(" warn ")
    assert "-> optimizer.learning_rate 1e+06 is far too high" in result.stdout
    assert result.stderr.splitlines()[-1] == "train.py: error: the doctor found what would fail; see above"
    assert not (tmp_path / "run").exists()


def test_memory_that_is_not_told_is_a_warning(monkeypatch):
    needed = {"training images": 2_000_000, "validation images": 1_000_000}
    monkeypatch.setattr(memory, "available_bytes", lambda: 5_000_000)
    finding = check_memory("expanded", needed)
    assert finding.status == "ok"
    assert "3 MB a device (training images 2.0 MB, validation images 1.0 MB); 5 MB free now" in finding.text
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert check_memory("expanded", needed).status == "warn"

"""Pods of train.py, evaluate.py and export.py, and one host of a pod that works alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, run_script, small_flags
from machines import QUICKLY
from test_resume import assert_same_run

from largebatch.exports import files as export_files
from largebatch.predictions import files as prediction_files

SMALL = {
    "batch.micro_batch_size": 16,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.1,
    "train.inner_steps": 1,
    "train.outer_steps": 3,
}


def train_command(tmp_path, workdir: str, **fields) -> list[str]:
    """python train.py with a small config."""
    flags = small_flags(tmp_path / "cache", **(SMALL | fields))
    return [sys.executable, str(ROOT / "train.py"), "--workdir", str(tmp_path / workdir), *flags]


def pod_command(command: list[str], hosts: int, devices: int) -> list[str]:
    """Return the arguments of Python that run a command under largebatch.pod."""
    return ["-m", "largebatch.pod", "--hosts", str(hosts), "--devices", str(devices), "--", *command]


def processes_with(text: str) -> dict[int, str]:
    """Running processes whose command line holds `text`."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    return {int(pid): args for pid, stat, args in rows if text in args and not stat.startswith("Z")}


def host_of(pid: int) -> str | None:
    """LARGEBATCH_HOST_INDEX in the environment of a process."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    return variables.get(b"LARGEBATCH_HOST_INDEX", b"").decode() or None


def start_pod(command: list[str]) -> subprocess.Popen:
    """Start a pod of two hosts with two devices each."""
    command = [sys.executable, *pod_command(command, 2, 2)]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | QUICKLY, **output)


def rows_of(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def hosts_of(workdir, pod: subprocess.Popen) -> dict[str, int]:
    """Return the processes of a pod's hosts, by LARGEBATCH_HOST_INDEX."""
    return {host_of(pid): pid for pid in processes_with(str(workdir)) if pid != pod.pid}


def wait_for(path, pod: subprocess.Popen) -> None:
    """Wait until a file is there."""
    while not path.exists():
        assert pod.poll() is None, pod.stderr.read()
        time.sleep(0.05)


@pytest.mark.full
def test_4x8_hosts_give_the_parameters_of_one_device(tmp_path):
    summaries, predictions = {}, {}
    train = {name: train_command(tmp_path, name, **{"batch.size": 128}) for name in ("pod", "one")}
    commands = {"pod": pod_command(train["pod"], 4, 8), "one": train["one"][1:]}
    for name, command in commands.items():
        result = run_script(*command, env=QUICKLY | {"JAX_NUM_CPU_DEVICES": "1"})  # the pod must not mind
        assert result.returncode == 0, result.stderr + result.stdout
        summary = summaries[name] = json.loads((tmp_path / name / "summary.json").read_text())
        with np.load(tmp_path / name / "predictions.npz", allow_pickle=False) as arrays:
            predictions[name] = dict(arrays)
        assert (summary["steps"], summary["examples_seen"]) == (3, 3 * 128)
    assert [(s["hosts"], s["devices"]) for s in summaries.values()] == [(4, 32), (1, 1)]
    np.testing.assert_array_equal(predictions["pod"]["ids"], predictions["one"]["ids"])
    # The same 128 of 640 views are summed in another order: float32 terms agree to about 1e-6, and three plain SGD
    # steps do not amplify that (LAMB would: it divides by near-zero second moments). Other views have other losses.
    np.testing.assert_allclose(predictions["pod"]["logits"], predictions["one"]["logits"], atol=2e-5)
    names = "train_loss", "grad_norm", "val_loss"
    for pod, one in zip(rows_of(tmp_path / "pod"), rows_of(tmp_path / "one"), strict=True):
        assert [pod[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-5)
    losses = [row["val_loss"] for row in rows_of(tmp_path / "one")]
    assert abs(losses[0] - losses[-1]) > 100 * 1e-5 * losses[0]  # a wrong gradient would show


@pytest.mark.full
def test_a_dead_host_is_named_and_takes_the_others_along(tmp_path):
    pod = start_pod(train_command(tmp_path, "run", **{"train.outer_steps": 100_000}))
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", pod)
        hosts = hosts_of(tmp_path / "run", pod)
        assert set(hosts) == {"0", "1"}
        os.kill(hosts["1"], signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = pod.communicate(timeout=60)
        assert time.monotonic() - killed < 30
    finally:
        pod.kill()
        pod.stderr.close()
        pod.wait()
    assert pod.returncode == 128 + signal.SIGKILL
    assert "host 1 was killed by SIGKILL" in stderr
    assert not processes_with(str(tmp_path / "run"))


@pytest.mark.full
def test_one_host_signalled_saves_and_stops_all_and_a_start_goes_on_bitwise(tmp_path):
    fields = {"train.inner_steps": 4, "train.outer_steps": 4, "batch.size": 150, "dataset.num_examples": 400}
    whole = run_script(*pod_command(train_command(tmp_path, "whole", **fields), 2, 2), env=QUICKLY)
    assert whole.returncode == 0, whole.stderr
    pod = start_pod(train_command(tmp_path, "cut", **fields))
    events = tmp_path / "cut" / "events.jsonl"
    wait_for(events, pod)
    os.kill(hosts_of(tmp_path / "cut", pod)["1"], signal.SIGTERM)
    _, stderr = pod.communicate(timeout=60)
    assert pod.returncode == 143, stderr
    assert "ending the others" not in stderr
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    started, stopped = lines[0], lines[-1]
    assert (started["devices"], started["hosts"]) == (4, 2)
    assert stopped["event"] == "interrupted"
    assert stopped["step"] < 16
    again = run_script(*pod_command(train_command(tmp_path, "cut", **fields), 2, 2), env=QUICKLY)
    assert again.returncode == 0, again.stderr
    assert f"resuming at step {stopped['step']}; the process before ended as interrupted" in again.stderr
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_replicas_that_differ_between_hosts_are_found_before_the_first_step():
    code = (
        "import jax; from largebatch.hosts import replicas, start; start.start_jax(); "
        "replicas.check_replicas(replicas.replicate(float(jax.process_index())), 'parameters')"
    )
    result = run_script(*pod_command([sys.executable, "-c", code], 2, 2), env=QUICKLY)
    assert result.returncode == 1
    assert "parameters differ between replicas: devices [2, 3] disagree with device 0" in result.stderr


@pytest.mark.full
def test_hosts_that_disagree_about_the_config_stop(tmp_path):
    command = (
        " ".join(train_command(tmp_path, "run")) + " --config.optimizer.learning_rate=0.${LARGEBATCH_HOST_INDEX}5"
    )
    result = run_script(*pod_command(["sh", "-c", command], 2, 1))
    assert result.returncode == 1
    assert "hosts disagree about the config" in result.stderr
    assert "optimizer.learning_rate: 0.05 on host 0, 0.15 on host 1" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_two_hosts_read_validation_in_blocks_and_write_parts_as_one_that_does_neither(tmp_path):
    fields = {"dataset.num_examples": 190, "batch.micro_batch_size": 1, "batch.size": 16, "train.outer_steps": 2}
    one = train_command(tmp_path, "one", **fields)[1:]
    result = run_script(*one, env=QUICKLY | {"JAX_NUM_CPU_DEVICES": "4"})
    assert result.returncode == 0, result.stderr
    python, *script = train_command(tmp_path, "two", **fields)
    command = [python, str(ROOT / "tests" / "pod" / "all_too_large.py"), *script]
    result = run_script(*pod_command(command, 2, 2), env=QUICKLY)
    assert result.returncode == 0, result.stderr
    assert "is read anew for every pass" in result.stderr
    for expected, row in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert (row["val_examples"], row["val_accuracy"]) == (19, expected["val_accuracy"])
        assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    expected, found = prediction_files.read(tmp_path / "one"), prediction_files.read(tmp_path / "two")
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


@pytest.mark.full
def test_evaluation_on_two_hosts_is_that_of_one(tmp_path):
    """Each host has a folder and a data cache of its own; the run lies on host 0, host 1's cache is damaged."""
    hosts = [tmp_path / "0", tmp_path / "1"]
    command = train_command(tmp_path / "0", "run", **{"augment.cache_dir": "cache"})
    hosts[0].mkdir()
    result = run_script(*command[1:], cwd=hosts[0], env=QUICKLY)
    assert result.returncode == 0, result.stderr
    shutil.copytree(hosts[0] / "cache", hosts[1] / "cache")
    (images,) = hosts[1].glob("cache/*/images-00000.raw")
    content = bytearray(images.read_bytes())
    content[-18 * 16 * 16 * 3] ^= 1  # the third of 10 validation images, before 10 test images: host 1 reads it
    images.write_bytes(content)
    evaluate = [str(ROOT / "evaluate.py"), "run", "--config.augment.cache_dir=cache", "--out"]
    one = run_script(*evaluate, "one.csv", cwd=hosts[0], env=QUICKLY | {"JAX_NUM_CPU_DEVICES": "4"})
    assert one.returncode == 0, one.stderr
    both = f"cd {tmp_path}/$LARGEBATCH_HOST_INDEX && {sys.executable} {' '.join(evaluate)} two.csv >out 2>err"
    result = run_script(*pod_command(["sh", "-c", both], 2, 2), env=QUICKLY)
    told = [(host / "err").read_text() for host in hosts]
    assert result.returncode == 0, told
    assert ["damaged cache" in text for text in told] == [False, True]
    assert (hosts[0] / "out").read_text().endswith(one.stdout)  # before it stands what Gloo says
    assert (hosts[0] / "two.csv").read_text() == (hosts[0] / "one.csv").read_text()
    assert one.stdout.count("over 10 images") == 1
    assert "accuracy" not in (hosts[1] / "out").read_text()
    assert not (hosts[1] / "two.csv").exists()


# As the second of two hosts has them; the first never comes.
OF_A_POD = QUICKLY | {
    "LARGEBATCH_NUM_HOSTS": "2",
    "LARGEBATCH_HOST_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
}


@pytest.mark.full
def test_one_host_of_a_pod_works_alone_and_of_all_one_writes(tmp_path):
    done = run_script(*train_command(tmp_path, "run", **{"train.outer_steps": 1})[1:], env=QUICKLY)
    assert done.returncode == 0, done.stderr
    run, cache = tmp_path / "run", f"--config.augment.cache_dir={tmp_path / 'cache'}"
    evaluate, export = [ROOT / "evaluate.py", run, cache], [ROOT / "export.py", run, "--out"]
    expected = run_script(*evaluate, "--out", tmp_path / "expected.csv", env=QUICKLY)
    done = run_script(*evaluate, "--alone", "--out", tmp_path / "alone.csv", env=OF_A_POD)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.stdout
    assert (tmp_path / "alone.csv").read_text() == (tmp_path / "expected.csv").read_text()

    done = run_script(*export, tmp_path / "alone", "--alone", env=OF_A_POD)
    assert done.returncode == 0, done.stderr
    each = f"{sys.executable} {' '.join(map(str, export))} {tmp_path / 'both'} >{tmp_path}/$LARGEBATCH_HOST_INDEX"
    done = run_script(*pod_command(["sh", "-c", each], 2, 1), env=QUICKLY)
    assert done.returncode == 0, done.stderr
    assert ["SHA-256" in (tmp_path / str(host)).read_text() for host in range(2)] == [True, False]
    for name in (export_files.ARRAYS, export_files.PROGRAM):
        assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()

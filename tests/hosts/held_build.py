"""A short run whose cache is slow to build: what each host of a pod does in tests/hosts/test_meeting.py.

    python -m largebatch.pod --hosts 2 --devices 1 -- python tests/hosts/held_build.py FOLDER SECONDS [METHOD]

Host 0 holds its build until the other host waits for it, and SECONDS more. With METHOD, of Checkpoints, that one
finds its disk full. Each host writes FOLDER/HOST.json.
"""

import functools
import json
import os
import sys
import threading
import time
from pathlib import Path

import jax
from jax.experimental import multihost_utils

FOLDER, SECONDS = Path(sys.argv[1]), float(sys.argv[2])
BUILDING, ARRIVED, BUILT = (FOLDER / name for name in ("building", "arrived", "built"))
SAMPLE_SEC = 0.02
LATE_SEC = 20.0
inside = {"collective": 0, "meeting": 0}  # how deep this host's main thread is in calls of each kind


def counted(kind: str, function):
    """`function`, whose running calls `inside` counts."""

    @functools.wraps(function)
    def call(*arguments, **options):
        inside[kind] += 1
        try:
            return jax.block_until_ready(function(*arguments, **options))
        finally:
            inside[kind] -= 1

    return call


def count_inside(kind: str, owner, name: str) -> None:
    """Puts the counted function in its own place."""
    setattr(owner, name, counted(kind, getattr(owner, name)))


for name in ("broadcast_one_to_all", "process_allgather", "sync_global_devices"):
    count_inside("collective", multihost_utils, name)
make_pmap = jax.pmap
jax.pmap = lambda *arguments, **options: counted("collective", make_pmap(*arguments, **options))

import train  # noqa: E402  after jax.pmap
from configs import default  # noqa: E402
from largebatch.data import cache_build  # noqa: E402
from largebatch.hosts import collectives, preemption, rendezvous  # noqa: E402
from largebatch.hosts.clusters import HOST_INDEX_VARIABLE  # noqa: E402
from largebatch.hosts.start import start_jax  # noqa: E402
from largebatch.runs import checkpoints  # noqa: E402
from largebatch.training import trainer  # noqa: E402
from largebatch.util import UserError  # noqa: E402

count_inside("collective", collectives, "gather")
count_inside("meeting", collectives, "gather_text")


def hold(build_files):
    """`build_files`, once the other host waits and SECONDS have passed."""

    def held(*arguments):
        BUILDING.touch()
        while not ARRIVED.exists():
            time.sleep(SAMPLE_SEC)
        time.sleep(SECONDS)
        BUILT.touch()
        build_files(*arguments)

    return held


def watch(samples: list[dict]) -> None:
    """Samples where this host is while host 0 builds."""
    while not BUILDING.exists():
        time.sleep(SAMPLE_SEC)
    # It may still be on its way out of an earlier rendezvous.
    while not inside["meeting"]:
        time.sleep(SAMPLE_SEC)
    ARRIVED.touch()
    while True:
        time.sleep(SAMPLE_SEC)
        sample = dict(inside)
        if BUILT.exists():
            return
        samples.append(sample)


def small_config():
    """A run of two updates."""
    config = default.get_config()
    config.augment.cache_dir = str(FOLDER / "cache")
    config.dataset.num_examples, config.dataset.image_size = 100, 16
    config.batch.micro_batch_size = 16
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.1
    config.train.inner_steps, config.train.outer_steps = 2, 1
    trainer.SECONDS_PER_CALL = 0.0  # a call for each update
    return config


def compiled_by_gathers(calls: int) -> int:
    """How many programs `calls` gathers of one shape compile, after a first one."""
    import numpy as np

    compiled = []

    def note(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    collectives.gather(np.arange(7))
    jax.monitoring.register_event_duration_secs_listener(note)
    for call in range(calls):
        rows = collectives.gather(np.arange(7) + call + jax.process_index())
        assert rows[:, 0].tolist() == [call, call + 1]
    gathered = len(compiled)
    collectives.gather(np.arange(8))
    assert len(compiled) > gathered, "the listener hears nothing"
    return gathered


def keys_left() -> int:
    """How many values earlier meetings left in the coordination service."""
    return len(rendezvous._store().key_value_dir_get("largebatch/meeting"))


def run() -> dict:
    """Trains; what this host found."""
    samples: list[dict] = []
    start_jax()
    if collectives.is_primary():
        cache_build.build_files = hold(cache_build.build_files)
    else:
        threading.Thread(target=watch, args=(samples,), daemon=True).start()
    summary = train.train_and_evaluate(small_config(), str(FOLDER / "run"))
    texts = collectives.gather_text(f"host {jax.process_index()} é\0" + "x" * (8 << 20) * jax.process_index())
    return {
        "samples": len(samples),
        "most in a collective": max((sample["collective"] for sample in samples), default=None),
        "waited to the end": bool(samples) and samples[-1]["meeting"] == 1,
        "status": summary["status"],
        "steps": summary["steps"],
        "params_sha256": summary["params_sha256"],
        "texts": [[text[:9], len(text)] for text in texts],
        "keys left": keys_left(),
        "compiled by 20 gathers": compiled_by_gathers(20),
    }


def fill_disk(*_):
    """In place of a method of Checkpoints."""
    raise UserError("--workdir: no space left")


def main() -> None:
    preemption.answer_signals()
    for method in sys.argv[3:]:
        if os.environ[HOST_INDEX_VARIABLE] == "0":
            setattr(checkpoints.Checkpoints, method, fill_disk)
    try:
        result, code = run(), 0
    except UserError as error:
        result, code = {"error": str(error)}, 1
    written = FOLDER / f"{os.environ[HOST_INDEX_VARIABLE]}.json"
    written.with_suffix(".part").write_text(json.dumps(result))
    written.with_suffix(".part").rename(written)
    if code:  # the first to leave takes the others along
        deadline = time.monotonic() + LATE_SEC
        while len(list(FOLDER.glob("*.json"))) < jax.process_count() and time.monotonic() < deadline:
            time.sleep(SAMPLE_SEC)
        os._exit(code)


if __name__ == "__main__":
    main()

"""A short run whose cache is slow to build: what each host of a pod does in tests/hosts/test_waiting.py.

    python -m largebatch.pod --hosts 2 --devices 2 -- python tests/hosts/slow_build.py FOLDER SECONDS [METHOD]

Host 0 holds its build for SECONDS. With METHOD, of Checkpoints, it finds its disk full.
"""

import os
import sys
import time
from pathlib import Path

import train
from configs import default
from largebatch import cli
from largebatch.data import cache_build
from largebatch.hosts import collectives, preemption
from largebatch.hosts.clusters import HOST_INDEX_VARIABLE
from largebatch.hosts.start import start_jax
from largebatch.runs import checkpoints
from largebatch.training import trainer
from largebatch.util import UserError

FOLDER, SECONDS = Path(sys.argv[1]), float(sys.argv[2])


def hold(build_files):
    """`build_files`, once SECONDS have passed."""

    def held(*arguments):
        (FOLDER / "building").touch()
        time.sleep(SECONDS)
        build_files(*arguments)

    return held


def small_config():
    """Return the config of a run of two steps."""
    config = default.get_config()
    config.augment.cache_dir = str(FOLDER / "cache")
    config.dataset.num_examples, config.dataset.image_size = 100, 16
    config.batch.micro_batch_size = 16
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 0.1
    config.train.inner_steps, config.train.outer_steps = 2, 1
    trainer.SECONDS_PER_CALL = 0.0  # a call for each step
    return config


def run() -> None:
    """Train."""
    preemption.answer_signals()
    start_jax()
    if collectives.is_primary():
        cache_build.build_files = hold(cache_build.build_files)
    train.train_and_evaluate(small_config(), str(FOLDER / "run"))


def fill_disk(*_):
    """Raise the error of a full disk, in place of a method of Checkpoints."""
    raise UserError("--workdir: no space left")


if __name__ == "__main__":
    for method in sys.argv[3:]:
        if os.environ[HOST_INDEX_VARIABLE] == "0":
            setattr(checkpoints.Checkpoints, method, fill_disk)
    cli.exit_after(run)

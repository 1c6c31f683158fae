"""A finished run as a folder that others can use without this project.

    python export.py runs/eurosat --out runs/eurosat_model
    python export.py runs/NAME --out average --ema      the moving average of the parameters

Takes the checkpoint with the best validation score. The folder holds model.safetensors (the arrays),
model.stablehlo (the network as a program of jax.export for CPUs, NVIDIA GPUs and TPUs, for any number of images),
pytorch_model.py (the network in PyTorch), model.json (classes, normalisation, config), README.md (the model card)
and SHA256SUMS. evaluate.py takes it in place of a run folder. On several hosts run it on each, and host 0 writes;
or on one of them with --alone.
"""

import json
import sys
from pathlib import Path

from absl import flags

from configs import default
from evaluate import TrainedRun, load_run, read_variables
from largebatch import cli, terminal
from largebatch.buckets import bucket
from largebatch.exports import card, files
from largebatch.hosts import collectives
from largebatch.hosts.start import start_jax
from largebatch.runs.load import load
from largebatch.runs.summary import versions
from largebatch.tasks.task import make_task
from largebatch.training.loss import make_logits_fn
from largebatch.util import UserError
from plan import make_network

# Fields of a checkpoint's summary that say how the network was made.
OF_SUMMARY = ("examples_seen", "global_batch_size", "params", "devices", "hosts", "platform", "device_kind")
OF_SUMMARY += ("git_commit", "versions")


def export(run_folder: Path, out: Path, *, ema: bool = False, alone: bool = False) -> str | None:
    """Write the network of a run's best checkpoint as the folder `out`, on host 0. Collective.

    Args:
      ema: parameters are their moving average.
      alone: work on this host alone, whatever cluster it is part of.
    Returns:
      The SHA-256 of its SHA256SUMS; None on the other hosts.
    Raises:
      UserError: the run cannot be used, or `out` not be written; on every host.
    """
    # Never where the run says: programs are code.
    cli.use_compilation_cache(default.get_config().augment.cache_dir)
    start_jax(num_hosts=1 if alone else None)
    # Before the work, and once more after it.
    collectives.agreed(lambda: files.check_out(out), collectives.is_primary())
    run = load_run(run_folder)
    if run.exported:
        raise UserError(f"{run_folder} is an export already; allowed: a run folder")
    task = make_task(run.config.task, len(run.data["class_names"]), run.targets)
    # As a run computes: on each platform by the convolution that is quick there, unless the config names one.
    networks = {platform: make_network(run.config, task, platform) for platform in ("cpu", "tpu")}
    variables = read_variables(run, networks["cpu"], ema=ema)

    def write() -> str:
        functions = [make_logits_fn(network, run.image_shape, *run.scale) for network in networks.values()]
        about = describe(run, networks["cpu"], ema=ema)
        contents = {
            files.ARRAYS: files.arrays_as_bytes(variables),
            files.PROGRAM: files.serialized(*functions, variables, run.image_shape, run.data["image_dtype"]),
            files.PYTORCH: (Path(files.__file__).parent / files.PYTORCH).read_bytes(),
            files.DESCRIPTION: f"{json.dumps(about, indent=1, allow_nan=False)}\n".encode(),
            files.CARD: card.card(about, default.get_config().to_dict()).encode(),
        }
        return files.write(out, contents)

    return collectives.agreed(write, collectives.is_primary())


def describe(run: TrainedRun, network, *, ema: bool) -> dict:
    """Return model.json: what evaluate.py and the card take of it, and what others need to build the network."""
    summary, whole_run = run.description["summary"], load(run.path)
    rows = [row for row in whole_run.rows if row.get("step") == run.step]
    scores = rows[-1] if rows else {"val_score": summary.get("best_score")}
    return {
        "format": files.FORMAT,
        "step": run.step,
        "ema": ema,
        "task": run.config.task.name,
        "score": run.targets.kind.score_column,
        "scores": {name: value for name, value in scores.items() if name.startswith("val_") and value is not None},
        "image_shape": list(run.image_shape),
        "network": files.network_of(network),
        "run": {name: summary.get(name) for name in OF_SUMMARY} | {"status": whole_run.status},
        "exported_by": versions(),
        "data": run.data,
        "config": run.description["config"],
    }


def main() -> None:
    """Read the command line and export.

    Raises:
      UsageError: the command line cannot be read.
      UserError: see `export`.
    """
    terminal.log_to_stderr()
    cli.path_flag("out", None, "Write the folder here; it is new or empty.")
    flags.DEFINE_bool("ema", False, "Take the moving average of the parameters.")
    flags.DEFINE_bool("alone", False, cli.ALONE_HELP)
    folders = cli.parse_plain_flags(sys.argv)
    if len(folders) != 1:
        raise cli.UsageError(f"give one run folder; found {' '.join(folders) or 'none'}")
    if not flags.FLAGS.out:
        raise cli.UsageError("--out: give the folder to write")
    if bucket.is_url(flags.FLAGS.out):
        raise cli.UsageError(f"--out: {flags.FLAGS.out}; allowed: a folder of this machine")
    out = Path(flags.FLAGS.out)
    digest = export(bucket.local_copy(folders[0]), out, ema=flags.FLAGS.ema, alone=flags.FLAGS.alone)
    if digest is not None:
        print(f"{out}: {', '.join(files.NAMES)}; SHA-256 of SHA256SUMS {digest}")


if __name__ == "__main__":
    cli.exit_after(main)

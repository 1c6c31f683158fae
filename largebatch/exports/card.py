"""The model card: figures, the command of the run, and how to load the network without this project."""

import json
import re
import shlex
from pathlib import Path, PurePosixPath

import jinja2

from largebatch.config.dicts import PATHS, RULES, flatten
from largebatch.util import printable

MAX_CLASSES = 100  # that are listed
ENDED = {
    "done": "ended as planned",
    "interrupted": "was stopped, and may go on",
    "diverged": "diverged later: this is its best checkpoint before",
    "pruned": "a sweep ended early",
}


def card(about: dict, defaults: dict) -> str:
    """Return the text of README.md.

    Args:
      about: the content of model.json.
      defaults: the config to which the command's fields are the difference.
    """
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = _code
    return environment.get_template("card.md.jinja").render(
        about,
        task=about["task"].replace("_", " and "),
        ended=ENDED.get(about["run"]["status"], "has not ended"),
        figures=_figures(about),
        output=_output(about),
        command=command(about["config"], defaults),
    )


def command(config: dict, defaults: dict) -> str:
    """Return the command of train.py with the fields of a config that differ from `defaults`, a line for each."""
    unset = flatten(json.loads(json.dumps(defaults)))  # with lists for tuples, as `config` has them
    lines = ["python train.py"]
    for field, value in flatten(config).items():
        if field not in RULES or not RULES[field].identity or value == unset.get(field):
            continue
        value = tuple(value) if isinstance(value, list) else value
        if field in PATHS and isinstance(value, str):
            value = PurePosixPath(value).name
        lines.append(shlex.quote(f"--config.{field}={printable(value)}"))
    return " \\\n    ".join(lines)


def _figures(about: dict) -> list[tuple[str, object]]:
    """Return the rows of the card's table."""
    config, run = about["config"], about["run"]
    optimizer, dataset, schedule = config["optimizer"], config["dataset"], config["schedule"]
    rate = f"{optimizer['name']}, learning rate {optimizer['learning_rate']}, {schedule['name']}"
    if schedule["scaling"] != "none":
        rate += f"; of a batch of {schedule['reference_batch_size']:,}, scaled to others ({schedule['scaling']})"
    batch = _number(run["global_batch_size"])
    if trace := config["batch"]["trace"]:
        batch += f"; it changed over the run as {_code(PurePosixPath(str(trace)).name)} says"
    elif config["batch"]["auto"]:
        batch += "; it followed the noise scale"
    split = f"{dataset['splits']}, seed {dataset['split_seed']}"
    devices = f"{run['devices']} x {_code(run['device_kind'] or run['platform'])}, {run['hosts']} host(s)"
    return [
        *((f"validation: `{name}`", _number(value)) for name, value in about["scores"].items()),
        ("steps", f"{about['step']:,}"),
        ("images seen", _number(run["examples_seen"])),
        ("batch", batch),
        ("optimizer", rate),
        ("parameters", f"{_number(run['params'])}, stored in float32"),
        ("arithmetic", about["network"]["dtype"]),
        ("data set", f"{_code(dataset['name'])}; ids of its examples have SHA-256 `{about['data']['ids']}`"),
        ("split", "as in a file" if dataset["split_file"] else split),
        ("seed", config["seed"]),
        ("trained on", devices),
        ("commit", run["git_commit"] or "not known"),
        ("versions", ", ".join(f"{name} {version}" for name, version in (run["versions"] or {}).items())),
    ]


def _output(about: dict) -> str:
    names, targets = about["data"]["class_names"], about["data"].get("targets")
    if targets is None:
        listed = ", ".join(map(_code, names)) if len(names) <= MAX_CLASSES else "`class_names` in `model.json`"
        return f"It gives logits, float32 `[b, {len(names)}]`, of these classes in this order: {listed}."
    masks = ", ".join(map(_code, targets["classes"]))
    parts = [f"{len(targets['classes'])} logits of {masks}"] if targets["classes"] else []
    parts += ["a depth, to be cut off at 0 and 1"] if targets["has_depth"] else []
    return f"It gives for each pixel, in this order: {'; '.join(parts)}; float32 `[b, height, width, channels]`."


def _number(value: object) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _code(text: object) -> str:
    """Return a name that others gave as code that does not end a table, a block or a span."""
    return "`" + re.sub(r"[`|]", "'", printable(text)) + "`"

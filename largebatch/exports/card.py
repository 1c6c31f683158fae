"""The model card: figures, the command of the run, and how to load the network without this project."""

import re
import shlex
from pathlib import Path, PurePosixPath

from largebatch.config.dicts import PATHS, RULES, flatten
from largebatch.exports import folder
from largebatch.tasks.kinds import KINDS
from largebatch.util import printable

MOST_CLASSES = 100  # that are listed
PYTORCH = Path(__file__).parent / "pytorch"

TEXT = """# {title}

{what}

| | |
|---|---|
{figures}

## Input and output

Images are `{image_dtype}` of shape `[b, {shape}]`, for any number b: pixel values as they come out of the file,
resized ({resize}). Both programs below normalise them, by `mean` and `std` of `model.json`. {output}

## The run

```
{command}
```

This is `configs/default.py` but for these fields. A path is only the name of a file or folder: give where yours is.

## Whole or damaged

`sha256sum -c SHA256SUMS`, or this in Python. It tells damage, not who made the files.

```python
{check}```

## JAX

With `jax`, `flatbuffers` and `safetensors`, in this folder. The program runs on CPUs, NVIDIA GPUs and TPUs. It is
code: run only what comes from somebody you trust. JAX {jax} wrote it, and promises to read it for six months.

```python
{load}```

## PyTorch

{pytorch}## This project

```
python evaluate.py FOLDER --images IMAGES
```
"""

CHECK = """import hashlib
import pathlib
import sys

names = {names}
whole = sorted(path.name for path in pathlib.Path().iterdir()) == sorted([*names, "SHA256SUMS"])
digests = {{name: hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest() for name in names if whole}}
lines = "".join(f"{{digest}}  {{name}}\\n" for name, digest in digests.items())
whole = whole and pathlib.Path("SHA256SUMS").read_bytes() == lines.encode()
sys.exit(None if whole else "damaged, or with other files")
"""

LOAD = """import numpy as np
from jax import export
from safetensors.numpy import load_file

arrays = load_file("model.safetensors")
with open("model.stablehlo", "rb") as file:
    program = export.deserialize(bytearray(file.read()))
images = np.zeros((1, {shape}), np.{image_dtype})
outputs = program.call(arrays, images)
"""

WITH_PYTORCH = """With `torch`, `safetensors` and `numpy`, in this folder.
`{function}(images)` takes a tensor of integers{rounding}.
On a GPU set `torch.backends.cudnn.allow_tf32 = False`, or PyTorch rounds what it multiplies.

```python
{code}```

"""
ROUNDING = ", rounds what is multiplied to bfloat16, and adds up in float32"


def card(about: dict, defaults: dict) -> str:
    """The text of README.md.

    Args:
      about: model.json.
      defaults: the config to which the command's fields are the difference.
    """
    config, network = about["config"], about["network"]
    kind, shape = KINDS[about["task"]], about["image_shape"]
    code = pytorch_code(network)
    if code is None:
        pytorch = f"There is no PyTorch text for `{network['class']}` yet; `model.safetensors` has its arrays.\n\n"
    else:
        rounding = ROUNDING if network["dtype"] == "bfloat16" else ""
        function = "maps" if kind.of_pixels else "logits"
        pytorch = WITH_PYTORCH.format(function=function, rounding=rounding, code=code)
    shape_text, image_dtype = ", ".join(map(str, shape)), about["data"]["image_dtype"]
    name = printable(config["dataset"]["name"])
    average = " The parameters are the moving average of those of the run." if about["ema"] else ""
    return TEXT.format(
        title=f"{config['model']['name']} on {_code(name)}",
        what=f"A network for {kind.name.replace('_', ' and ')}, at update {about['step']:,}.{average}",
        figures="\n".join(f"| {name} | {value} |" for name, value in _figures(about)),
        image_dtype=image_dtype,
        shape=shape_text,
        resize=config["dataset"]["resize"],
        output=_output(about),
        command=command(config, defaults),
        check=CHECK.format(names=list(folder.NAMES)).replace("'", '"'),
        jax=about["exported_by"]["jax"],
        load=LOAD.format(shape=shape_text, image_dtype=image_dtype),
        pytorch=pytorch,
    )


def command(config: dict, defaults: dict) -> str:
    """train.py with the fields of a config that differ from `defaults`, a line for each."""
    config, defaults = flatten(config), flatten(defaults)
    lines = ["python train.py"]
    for field, value in config.items():
        value = tuple(value) if isinstance(value, list) else value
        unset = defaults.get(field)
        unset = tuple(unset) if isinstance(unset, list) else unset
        if field not in RULES or not RULES[field].identity or value == unset:
            continue
        if field in PATHS and isinstance(value, str):
            value = PurePosixPath(value).name
        lines.append(shlex.quote(f"--config.{field}={printable(value)}"))
    return " \\\n    ".join(lines)


def pytorch_code(network: dict) -> str | None:
    """The network in PyTorch, which reads its settings from model.json; None where there is no text of it.

    Args:
      network: see `contents.network_of`.
    """
    path = PYTORCH / f"{network['class'].lower()}.py"
    if not path.exists():
        return None
    texts = [(PYTORCH / name).read_text() for name in ("layers.py", f"norm_{network['norm']}.py")] + [
        path.read_text()
    ]
    imports, lines = [], []
    for line in "".join(f"{text}\n\n" for text in texts).splitlines():
        if re.match(r"(from|import) ", line):
            imports.append(line)
        else:
            lines.append(line)
    # Each once; ours are in the text itself.
    imports = [line for line in dict.fromkeys(imports) if not line.startswith("from largebatch.")]
    body = re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()
    return "\n".join(imports) + f"\n\n{body}\n"


def _figures(about: dict) -> list[tuple[str, object]]:
    """Rows of the card's table."""
    config, run = about["config"], about["run"]
    optimizer, dataset, batch = config["optimizer"], config["dataset"], run["global_batch_size"]
    scores = [(f"validation: `{name}`", _number(value)) for name, value in about["scores"].items()]
    split = (
        "as in a file"
        if dataset.get("split_file")
        else f"{dataset.get('splits', 'auto')}, seed {dataset['split_seed']}"
    )
    return [
        *scores,
        ("updates", f"{about['step']:,}"),
        ("images seen", _number(run["examples_seen"])),
        ("batch", _number(batch)),
        (
            "optimizer",
            f"{optimizer['name']}, learning rate {optimizer['learning_rate']}, {config['schedule']['name']}",
        ),
        ("parameters", f"{_number(run['params'])}, stored in float32"),
        ("arithmetic", about["network"]["dtype"]),
        ("data set", f"{_code(dataset['name'])}; ids of its examples have SHA-256 `{about['data']['ids']}`"),
        ("split", split),
        ("seed", config["seed"]),
        (
            "trained on",
            f"{run['devices']} x {_code(run['device_kind'] or run['platform'])}, {run['hosts']} host(s)",
        ),
        ("commit", run["git_commit"] or "not known"),
        ("versions", ", ".join(f"{name} {version}" for name, version in (run["versions"] or {}).items())),
    ]


def _output(about: dict) -> str:
    names = about["data"]["class_names"]
    targets = about["data"].get("targets")
    if targets is None:
        listed = ", ".join(map(_code, names)) if len(names) <= MOST_CLASSES else "`class_names` in `model.json`"
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
    """A name that others gave, which is not to end a table, a block or a span."""
    return "`" + re.sub(r"[`|]", "'", printable(text)) + "`"

"""Files of an exported network: written whole or not at all, and compared with their digests when read.

model/model.safetensors   the arrays
model/model.stablehlo     the network as a program for CPUs, NVIDIA GPUs and TPUs
model/pytorch_model.py    the network in PyTorch
model/model.json          what is known of it: classes, normalisation, config, scores
model/README.md           the model card
model/SHA256SUMS          digests of these; `sha256sum -c SHA256SUMS` checks them by hand
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import linen as nn
from jax import export, lax

from largebatch import util
from largebatch.runs.checkpoints import LoadedCheckpoint, named_leaves
from largebatch.util import UserError

ARRAYS, PROGRAM, PYTORCH = "model.safetensors", "model.stablehlo", "pytorch_model.py"
DESCRIPTION, CARD, SUMS = "model.json", "README.md", "SHA256SUMS"
NAMES = (CARD, DESCRIPTION, ARRAYS, PROGRAM, PYTORCH)
FORMAT = 3
PLATFORMS = ("cpu", "cuda", "tpu")  # for which the program is lowered


def is_export(folder: Path) -> bool:
    """Return True if a folder is an exported network, whole or not."""
    return (folder / DESCRIPTION).exists() or (folder / ARRAYS).exists()


def network_of(module) -> dict:
    """Return the fields of a flax module as plain JSON, for those who build the network elsewhere."""
    plain = {"class": type(module).__name__}
    for field in dataclasses.fields(module):
        if field.name not in ("parent", "name", "conv"):
            value = getattr(module, field.name)
            plain[field.name] = value.__name__ if isinstance(value, type) else value
    return plain | {"dtype": np.dtype(module.dtype).name}


def arrays_as_bytes(variables: dict) -> bytes:
    """Return model.safetensors of the variables of a network, {"params": ..., "batch_stats": ..., ...}."""
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in named_leaves(variables).items()}
    return safetensors.numpy.save(arrays, metadata={"format": "pt"})


# ---- the program ------------------------------------------------------------------------------------


def serialized(
    on_cpu: Callable, elsewhere: Callable, variables: dict, image_shape: tuple[int, ...], image_dtype: str
) -> bytes:
    """Return the program (arrays by name, integer images [b, H, W, C] of any b) -> float32 [b, ...].

    Args:
      on_cpu, elsewhere: (variables, images) -> what the network gives; see `loss.make_logits_fn`.
      variables: NumPy arrays; they are arguments of the program and not in it. Names are those of `named_leaves`.
      image_shape: height, width, channels.
    """
    names, structure = list(named_leaves(variables)), jax.tree.structure(variables)

    def program(arrays, images):
        tree = jax.tree.unflatten(structure, [arrays[name] for name in names])
        with nn.intercept_methods(_keep_sums_of_head):
            return lax.platform_dependent(tree, images, cpu=on_cpu, default=elsewhere)

    shape = export.symbolic_shape(", ".join(["b", *map(str, image_shape)]))
    arrays = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named_leaves(variables).items()}
    images = jax.ShapeDtypeStruct(shape, np.dtype(image_dtype))
    with _without_places():
        return bytes(export.export(jax.jit(program), platforms=PLATFORMS)(arrays, images).serialize())


@contextlib.contextmanager
def _without_places():
    """Leave out the source file of every operation, which would name a folder on this machine."""
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def _keep_sums_of_head(layer: Callable, arguments, options, context):
    """Apply the last layer without rounding its sums: between 4 and 8 two neighbours in bfloat16 are 0.03 apart.

    What a run sees is rounded there, so this differs from it by up to half of that; rounded too, it would now and
    then be rounded the other way, and differ by all of it.
    """
    head = context.module
    if not (isinstance(head, nn.Dense) and head.name == "head" and context.method_name == "__call__"):
        return layer(*arguments, **options)
    kernel, bias = (head.variables["params"][name].astype(head.dtype) for name in ("kernel", "bias"))
    return jnp.dot(arguments[0].astype(head.dtype), kernel, preferred_element_type=jnp.float32) + bias


# ---- the folder -------------------------------------------------------------------------------------


def _sums_of(contents: dict[str, bytes]) -> list[str]:
    """Return the lines of SHA256SUMS."""
    return [f"{hashlib.sha256(contents[name]).hexdigest()}  {name}" for name in NAMES]


def check_out(out: Path) -> None:
    """Refuse a folder to write that is in use.

    Raises:
      UserError: names what is there.
    """
    kind = ""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        kind = "is no folder"
    elif out.exists() and any(out.iterdir()):
        kind = "is not empty"
    elif out.exists() and out.samefile(Path.cwd()):  # which cannot be replaced
        kind = "is the working folder"
    if kind:
        raise UserError(f"--out: {out} exists and {kind}; allowed: a new or an empty folder")


def write(out: Path, contents: dict[str, bytes]) -> str:
    """Write the files of NAMES and their digests as the folder `out`, which appears whole or not at all.

    Returns:
      The SHA-256 of SHA256SUMS, which stands for all of them.
    Raises:
      UserError: it cannot be written.
    """
    check_out(out)
    sums = "".join(f"{line}\n" for line in _sums_of(contents)).encode()
    temporary = util.beside(out)
    try:
        util.remove_stale(out)
        temporary.mkdir(parents=True)
        for name, content in (contents | {SUMS: sums}).items():
            util.write_through(temporary / name, content)
        temporary.rename(out)
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            util.remove(temporary)
    return hashlib.sha256(sums).hexdigest()


def read(folder: Path) -> LoadedCheckpoint:
    """Read an exported folder as the checkpoint that it was made of.

    Raises:
      UserError: a file is missing or damaged, or of another version of this code.
    """
    contents = {}
    for name in (*NAMES, SUMS):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read ({error.strerror})") from error
    recorded = contents[SUMS].decode(errors="replace").splitlines()
    for name, line in zip(NAMES, _sums_of(contents), strict=True):
        if line not in recorded:
            raise UserError(f"{folder / name} does not match its SHA-256 in {SUMS}")
    about = json.loads(contents[DESCRIPTION])
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / DESCRIPTION}: format {about.get('format')}; allowed: {FORMAT}")
    arrays = {}
    for name, array in safetensors.numpy.load(contents[ARRAYS]).items():
        arrays[f"state.{name}" if name.startswith("params.") else f"state.model_state.{name}"] = array
    return LoadedCheckpoint(arrays, about)

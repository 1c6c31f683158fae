"""Folders that somebody made to look like an export, their digests right: one line each, and nothing is run."""

import errno
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

import evaluate
import model
from configs import default
from largebatch import util
from largebatch.exports import contents, folder
from largebatch.util import UserError

SHAPE = (16, 16, 3)
CLASSES = ["ash", "elm", "oak"]


def description() -> dict:
    """What model.json holds at least."""
    config = json.loads(default.get_config().to_json())
    data = {"class_names": CLASSES, "image_shape": list(SHAPE), "image_dtype": "uint8", "mean": [1.0] * 3}
    data |= {"std": [2.0] * 3, "ids": "1", "labels": "2", "pixels": "3", "network_version": model.NETWORK_VERSION}
    return {"format": contents.FORMAT, "step": 3, "ema": False, "config": config, "data": data}


@pytest.fixture(scope="module")
def sound() -> dict[str, bytes]:
    """The files of a sound export; evaluate.py never reads the program."""
    params, state = model.init_variables(model.create_model("convnet", 3, "float32", "lax"), SHAPE, 0)
    return {
        folder.ARRAYS: contents.arrays_as_bytes({"params": params, **state}),
        folder.PROGRAM: b"a program",
        folder.DESCRIPTION: contents.description_as_bytes(description()),
        folder.CARD: b"a card",
    }


def load(path: Path):
    """All that evaluate.py reads of an export."""
    run = evaluate.load_run(path)
    task = evaluate.make_task(run.config.task, len(run.data["class_names"]), run.targets)
    return evaluate.read_variables(run, evaluate.make_network(run.config, task, "cpu"), ema=False)


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 1000


def test_a_sound_folder_is_read(sound, tmp_path):
    folder.write(tmp_path / "model", sound)
    assert load(tmp_path / "model")["params"]["head"]["kernel"].shape == (128, 3)


@pytest.mark.parametrize("field", ["config.task.x", "config.x"])
def test_a_field_of_other_code_is_passed_over(sound, tmp_path, field):
    about = json.dumps(changed(field, {})).encode()
    folder.write(tmp_path / "model", sound | {folder.DESCRIPTION: about})
    load(tmp_path / "model")


def changed(path: str, value) -> dict:
    """model.json with another value at a dotted path."""
    about = description()
    *groups, last = path.split(".")
    inner = about
    for group in groups:
        inner = inner[group]
    inner[last] = value
    return about


HOSTILE = {
    "no JSON": (b"{", "model.json is no JSON"),
    "no text": (b"\xff\xfe{}", "model.json is no JSON"),
    "deep": (b"[" * 100_000, r"model.json is no JSON \(nested too deeply\)"),
    "NaN": (b'{"step": NaN}', r"model.json is no JSON \(NaN is no number of JSON\)"),
    "no object": (b"[1]", "model.json: format: None; allowed: 1"),
    "later format": (changed("format", 2), "model.json: format: 2; allowed: 1"),
    "format true": (changed("format", True), "model.json: format: True; allowed: 1"),
    "step": (changed("step", -1), "model.json: step: -1; allowed: an integer >= 0"),
    "ema": (changed("ema", "yes"), "model.json: ema: 'yes'; allowed: true | false"),
    "config": (changed("config", [1]), r"model.json: config: \[1\]; allowed: the fields of a config"),
    "group": (changed("config.model", 5), "its config cannot be read"),
    "type": (changed("config.dataset.split_seed", {"a": {}}), "its config cannot be read"),
    "network": (changed("config.model.name", "../../x"), r"model\.name: '../../x'; allowed"),
    "list": (changed("config.model.name", ["convnet"]), r"model\.name|its config cannot be read"),
    "no data": (changed("data", "x" * 10_000), "model.json: data: 'xxx.*; allowed: what the network"),
    "classes": (changed("data.class_names", [1]), r"data\.class_names: \[1\]; allowed: a list of texts"),
    "no classes": (changed("data.class_names", []), r"data\.class_names: \[\]; allowed: one name or more"),
    "number": (changed("config.model.norm_decay", 10**400), "its config cannot be read"),
    "no size": (changed("config.batch.size", True), "its config cannot be read"),
    "large": (changed("data.image_shape", [10**9, 10**9, 3]), r"data\.image_shape: .*; allowed: height and width"),
    "two sides": (changed("data.image_shape", [16, 16]), r"data\.image_shape: \[16, 16\]; allowed: height"),
    "empty": (changed("data.image_shape", [0, 16, 3]), r"data\.image_shape: \[0, 16, 3\]; allowed: height"),
    "float64": (changed("data.image_dtype", "float64"), r"data\.image_dtype: 'float64'; allowed: uint8 \| uint16"),
    "object": (changed("data.image_dtype", {}), r"data\.image_dtype: \{\}; allowed: uint8 \| uint16"),
    "zero": (changed("data.std", [0.0] * 3), r"data\.std: .*; allowed: a list of numbers above 0"),
    "huge number": (changed("data.mean", [1e300] * 3), r"data\.mean: .*; allowed: a list of numbers"),
    "means": (changed("data.mean", [1.0]), "3 channels with 1 means and 3 deviations; allowed: as many of each"),
    "targets": (changed("data.targets", {"classes": 5}), r"data\.targets: .*; allowed: classes and has_depth"),
    "digest": (changed("data.ids", None), r"data\.ids: None; allowed: a text"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_descriptions_are_named(sound, tmp_path, name):
    about, message = HOSTILE[name]
    content = about if isinstance(about, bytes) else json.dumps(about).encode()
    folder.write(tmp_path / "model", sound | {folder.DESCRIPTION: content})
    assert_refused(tmp_path / "model", message)


def with_header(header: bytes, num_bytes: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if num_bytes is None else num_bytes) + header + data


def header_of(**arrays) -> bytes:
    return json.dumps(arrays).encode()


LARGE = header_of(**{"params.x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
WRAPPED = header_of(**{"params.x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}})
OVERLAP = header_of(
    **{f"params.{name}": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "xy"},
)
HOSTILE_ARRAYS = {
    "empty": (b"", "model.safetensors: a header of 0 bytes; allowed: 1 to"),
    "short": (b"1234", "model.safetensors: a header of 0 bytes; allowed: 1 to"),
    "huge header": (with_header(b"{}", 2**63), r"model.safetensors: a header of 9,223,\S+ bytes; allowed: 1 to"),
    "larger header than file": (with_header(b"{}", 1000), "model.safetensors is no safetensors file"),
    "no JSON": (with_header(b"{"), "model.safetensors is no safetensors file"),
    "deep": (with_header(b'{"x":' * 100_000), "model.safetensors is no safetensors file"),
    "more data than file": (with_header(LARGE), "model.safetensors is no safetensors file"),
    "shape that wraps": (with_header(WRAPPED), "model.safetensors is no safetensors file"),
    "twice the same data": (with_header(OVERLAP, data=bytes(8)), "model.safetensors is no safetensors file"),
    "integers": (save({"params.x": np.zeros(3, np.int64)}), r"array params\.x is of I64; allowed: F32"),
    "long name": (
        save({"x" * 10_000: np.zeros(3, np.float32)}),
        r"model.safetensors: array x+\.\.\. has a name of",
    ),
    "other arrays": (save({"../../x": np.zeros(3, np.float32)}), "params.Conv_0.bias is missing there"),
    "many": (
        save({f"x{n}": np.zeros(1, np.float32) for n in range(999)}),
        r"code: model_state\.x0 is float32\[1\] there, missing here; .* \.\.\.$",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_hostile_arrays_are_named(sound, tmp_path, name):
    content, message = HOSTILE_ARRAYS[name]
    folder.write(tmp_path / "model", sound | {folder.ARRAYS: content})
    assert_refused(tmp_path / "model", message)


def test_names_outside_the_folder_and_other_lists_are_refused(sound, tmp_path):
    path = tmp_path / "model"
    folder.write(path, sound)
    sums = (path / folder.SUMS).read_text()
    for text in (
        sums + f"{'0' * 64}  ../../etc/passwd\n",
        sums + sums,
        sums.replace("\n", "\r\n"),
        sums.replace("  README.md", " *README.md"),
        sums.upper(),
        "",
    ):
        (path / folder.SUMS).write_bytes(text.encode())
        assert_refused(path, r"does not match its SHA-256|is not the list of the digests of README.md")
    (path / folder.SUMS).write_text(sums)
    (path / "more").mkdir()
    assert_refused(path, r"more is under no digest; allowed: README.md, model.json, ")


def test_a_file_that_is_too_large_is_named(sound, tmp_path):
    path = tmp_path / "model"
    folder.write(path, sound)
    with (path / folder.CARD).open("wb") as file:
        file.truncate(2**40)  # sparse
    assert_refused(path, r"README.md cannot be read \(1,099,511,627,776 bytes; allowed: up to 16,777,216\)")


@pytest.mark.parametrize("number", range(5))
def test_a_full_disk_is_named_and_leaves_nothing(sound, tmp_path, monkeypatch, number):
    written = []

    def write_until_full(path, content):
        if len(written) == number:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        path.write_bytes(content)

    monkeypatch.setattr(util, "write_through", write_until_full)
    out = tmp_path / "model"
    out.mkdir()
    with pytest.raises(
        UserError, match=rf"^--out: cannot write {re.escape(str(out))} \(No space left on device\)$"
    ):
        folder.write(out, sound)
    assert list(tmp_path.iterdir()) == [out]
    assert list(out.iterdir()) == []


def test_what_could_not_be_read_again_is_not_written(sound, tmp_path, monkeypatch):
    monkeypatch.setitem(folder.MOST_BYTES, folder.PROGRAM, 5)
    with pytest.raises(UserError, match=r"^--out: model.stablehlo has 9 bytes; allowed: up to 5$"):
        folder.write(tmp_path / "model", sound)
    assert list(tmp_path.iterdir()) == []

"""The round trip of a run: exported, loaded without this project's code, and the same logits."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line_error, decode_all, make_small_config, run_script
from machines import QUICKLY
from PIL import Image

import evaluate
import export
import train
from configs import default
from largebatch.data.sources import synthetic
from largebatch.exports import card, files
from largebatch.runs import reader
from largebatch.util import UserError

NUM_IMAGES = 200
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}  # of logits below 8; bfloat16 has steps of 0.03 from 4 to 8
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.full)]
NAMES = (*files.NAMES, files.SUMS)
NO_TORCH = "PyTorch is not installed: benchmarks/peers/torch_requirements.txt"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, session_cache):
    """A home of its own; splits come from the tests' cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(evaluate, "own_cache_dir", lambda overrides: str(session_cache))


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, session_cache):
    """Make a finished run of a dtype, once: of the plain network, or of one with all that a convnet may have."""

    @functools.cache
    def make(dtype: str) -> Path:
        config = make_small_config(session_cache)
        config.model.dtype, config.batch.size = dtype, 128
        config.train.inner_steps, config.train.outer_steps = 15, 1  # the best checkpoint is the last
        if dtype == "bfloat16":
            config.train.ema_decay, config.train.label_smoothing = 0.5, 0.2
            config.model.update(
                {"name": "convnet", "norm": "batch", "stem": "whitened", "side_heads": True, "norm_decay": 0.5}
            )
        path = tmp_path_factory.mktemp("runs") / dtype
        train.train_and_evaluate(config, str(path))
        return path

    return make


@pytest.fixture(scope="module")
def make_model(make_run, tmp_path_factory):
    """Make what export.py makes of it, once."""

    @functools.cache
    def make(dtype: str) -> Path:
        path = tmp_path_factory.mktemp("models") / dtype
        export.export(make_run(dtype), path)
        return path

    return make


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Textures that no run has seen, in folders of their classes."""
    path, images = tmp_path_factory.mktemp("pictures"), synthetic.synthetic(NUM_IMAGES, 16, seed=7)
    for number, label in enumerate(synthetic.synthetic_labels(NUM_IMAGES)):
        target = path / synthetic.CLASSES[label] / f"{number:03d}.png"
        target.parent.mkdir(exist_ok=True)
        Image.fromarray(images[number]).save(target)
    return path


def logits_of(path: Path, pictures: Path, **options):
    """Return the images, and the logits by evaluate.py."""
    run = evaluate.load_run(path)
    examples = evaluate.shard_images(str(pictures), run)
    options = {"num_views": 1, "shift": 0, "ema": False} | options
    result = evaluate.predict(run, examples, whole=True, **options)
    return decode_all(examples.dataset), result[: len(examples.dataset.labels)]


def outputs_of(code: str, more: str, model: Path, images: np.ndarray, tmp_path: Path) -> np.ndarray:
    """Return `found`, which `more` sets by the code of a card, without this project on the path."""
    np.save(tmp_path / "images.npy", images)
    beside = f"images = np.load({str(tmp_path / 'images.npy')!r})"
    save = f"np.save({str(tmp_path / 'found.npy')!r}, found)"
    ours = "import sys; assert not [name for name in sys.modules if name.startswith('largebatch')]"
    command = [sys.executable, "-I", "-c", "\n".join([code, "import numpy as np", beside, more, save, ours])]
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY["XLA_FLAGS"]}
    result = subprocess.run(command, cwd=model, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return np.load(tmp_path / "found.npy")


def assert_same_logits(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert expected.shape == (NUM_IMAGES, len(synthetic.CLASSES))
    assert len(np.unique(expected.argmax(axis=1))) >= 3
    assert abs(expected).max() < 8
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_program_and_pytorch_give_the_logits_of_the_run_without_our_code(
    make_run, make_model, pictures, tmp_path, dtype
):
    images, expected = logits_of(make_run(dtype), pictures)
    model, parts = make_model(dtype), "[images[:1], images[1:]]"
    by_jax, by_torch = re.findall(
        r"^```python\n(.*?)^```$", (model / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    more = f"""found = np.asarray(program.call(arrays, images))
in_parts = np.concatenate([program.call(arrays, part) for part in {parts}])
np.testing.assert_allclose(in_parts, found, rtol=0, atol={TOLERANCES[dtype]})
assert program.platforms == ("cpu", "cuda", "tpu"), program.platforms
assert found.dtype == np.float32"""
    assert_same_logits(outputs_of(by_jax, more, model, images, tmp_path), expected, TOLERANCES[dtype])
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    paths = [str(model), str(Path(torch.__file__).parents[1])]
    code, more = (
        f"import sys\nsys.path[:0] = {paths}\n{by_torch}",
        "found = outputs(torch.from_numpy(images)).numpy()",
    )
    assert_same_logits(outputs_of(code, more, model, images, tmp_path), expected, TOLERANCES[dtype])


def test_evaluate_takes_an_export_in_place_of_the_run(make_run, make_model, pictures, tmp_path):
    found = []
    for path in (make_run("float32"), make_model("float32")):
        accuracy = evaluate.evaluate(path, images=str(pictures), out=str(tmp_path / "out.csv"))
        table = (tmp_path / "out.csv").read_text()
        found.append([accuracy, table, evaluate.evaluate(path, "test"), evaluate.evaluate(path, views=True)])
    assert found[0] == found[1]
    assert len(found[0][1].splitlines()) == 1 + NUM_IMAGES


@pytest.mark.full
def test_the_moving_average_is_exported_and_named(make_run, make_model, pictures, tmp_path, capsys):
    run, model = make_run("bfloat16"), tmp_path / "model"
    export.export(run, model, ema=True)
    _, expected = logits_of(run, pictures, ema=True)
    _, found = logits_of(model, pictures)
    np.testing.assert_array_equal(found, expected)
    assert abs(expected - logits_of(run, pictures)[1]).max() > 1e-3
    evaluate.evaluate(model, images=str(pictures))
    assert "moving average of the parameters" in capsys.readouterr().out
    assert "The parameters are the moving average" in (model / "README.md").read_text()
    for path, kept in ((model, "the"), (make_model("bfloat16"), "no")):
        with pytest.raises(UserError, match=rf"^--ema: {path} is an export of {kept} moving average; allowed"):
            evaluate.evaluate(path, images=str(pictures), ema=True)


# ---- the card ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_card_has_the_figures_and_the_command_of_the_run(make_run, make_model, dtype):
    run, model = make_run(dtype), make_model(dtype)
    text, about = (model / "README.md").read_text(), json.loads((model / "model.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    row = next(row for row in reader.read_run(run).rows if row["step"] == summary["best_step"])
    for line in (
        f"| validation: `val_accuracy` | {summary['best_val_accuracy']:.6g} |",
        f"| validation: `val_loss` | {row['val_loss']:.6g} |",
        f"| steps | {summary['best_step']} |",
        f"| images seen | {row['examples_seen']:,} |",
        f"| arithmetic | {dtype} |",
        f"| commit | {summary['git_commit'] or 'not known'} |",
        f"jax {summary['versions']['jax']}",
        *(f"`{name}`" for name in synthetic.CLASSES),
    ):
        assert line in text
    assert about["data"]["class_names"] == list(synthetic.CLASSES)
    command = re.search(r"^```\n(python train.py .*?)^```$", text, re.MULTILINE | re.DOTALL).group(1)
    arguments = command.replace("\\\n", " ").split()[2:]
    code = "import sys; from largebatch import cli; print(cli.parse_flags(['x', *sys.argv[1:]]).to_json())"
    result = run_script("-c", code, *arguments)
    found, expected = json.loads(result.stdout), json.loads((run / "config.json").read_text())
    found["augment"]["cache_dir"] = expected["augment"]["cache_dir"]
    assert found == expected


def test_the_card_names_what_shaped_the_run_and_no_folder_of_this_machine(make_model):
    model = make_model("float32")
    about = json.loads((model / files.DESCRIPTION).read_text())
    about["run"]["status"] = "diverged"
    about["config"]["schedule"] |= {"scaling": "sqrt", "reference_batch_size": 512}
    about["config"]["batch"]["trace"] = "/data/grows.csv"
    text = card.card(about, default.get_config().to_dict())
    for words in ("a run that diverged later", "a batch of 512, scaled to others (sqrt)", "as `grows.csv` says"):
        assert words in text
    for name in (files.PROGRAM, files.CARD, files.ARRAYS, files.PYTORCH):
        content = (model / name).read_bytes()
        assert str(ROOT).encode() not in content
        assert tempfile.gettempdir().encode() not in content


# ---- damage and bad input ------------------------------------------------------------------------------


def test_a_flipped_bit_is_refused_by_evaluate_and_by_sha256sum(make_model, tmp_path):
    model = Path(shutil.copytree(make_model("float32"), tmp_path / "copy"))
    check = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=model, capture_output=True).returncode == 0
    for name in NAMES:
        whole = (model / name).read_bytes()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        (model / name).write_bytes(damaged)
        with pytest.raises(UserError, match=r"does not match its SHA-256 in SHA256SUMS$"):
            evaluate.load_run(model)
        assert subprocess.run(check, cwd=model, capture_output=True).returncode == 1
        (model / name).write_bytes(whole)
    evaluate.load_run(model)
    (model / files.PROGRAM).unlink()
    with pytest.raises(UserError, match=rf"{files.PROGRAM} cannot be read \(No such file"):
        evaluate.load_run(model)
    contents = {name: (make_model("float32") / name).read_bytes() for name in files.NAMES}
    about = json.loads(contents[files.DESCRIPTION]) | {"format": 1}
    files.write(tmp_path / "changed", contents | {files.DESCRIPTION: json.dumps(about).encode()})
    with pytest.raises(UserError, match=r"model\.json: format 1; allowed: 3$"):
        evaluate.load_run(tmp_path / "changed")


def test_bad_input_is_one_line_and_writes_nothing(make_run, make_model, tmp_path, monkeypatch):
    run, out, model = make_run("float32"), tmp_path / "out", make_model("float32")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    damaged = shutil.copytree(run, tmp_path / "damaged")
    for path in damaged.glob("checkpoints/*/arrays/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    cases = {
        (tmp_path / "nowhere", out): r"nowhere is no run folder: it has no config\.json",
        (damaged, out): "^damaged checkpoint: .*damaged/.*arrays",
        (run, tmp_path / "full" / "x"): r"^--out: .*x exists and is no folder; allowed: a new or an empty folder$",
        (run, tmp_path / "full" / "x" / "y"): r"^--out: cannot write .*y \(Not a directory\)$",
        (model, out): "is an export already; allowed: a run folder",
        (run, Path()): r"^--out: \. exists and is the working folder; allowed: a new or an empty folder$",
    }
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for arguments, message in cases.items():
        with pytest.raises(UserError, match=message):
            export.export(*arguments)
    result = run_script("export.py", run, "--out", tmp_path / "full")
    assert_one_line_error(result, "export.py: error: --out:", "is not empty")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["damaged", "empty", "full"]

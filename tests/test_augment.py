import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from conftest import assert_one_line_error, facts_of, make_folder, run_script, typed
from PIL import Image

import augment
import train
from build import ProgramCache, programs_of
from largebatch.data import random_augment
from largebatch.data.cache import CACHE_VERSION, DamagedCache
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory
from largebatch.tasks.task import Classification
from largebatch.training.views import make_read, select_views
from largebatch.util import BadSetting, UserError
from plan import data_fields, plan_run


def test_8_views_are_the_dihedral_group():
    corner = np.arange(3 * 3 * 1, dtype=np.uint8).reshape(1, 3, 3, 1)
    views = [augment.apply_view(corner, view).tobytes() for view in range(8)]
    assert len(set(views)) == 8  # distinct
    assert views[0] == corner.tobytes()  # with the identity
    for first, second in itertools.product(range(8), repeat=2):  # closed
        assert augment.apply_view(augment.apply_view(corner, first), second).tobytes() in views
    for turns, flip in itertools.product(range(4), (False, True)):  # rotations, with and without a flip
        turned = np.rot90(corner, turns, axes=(1, 2))
        assert (turned[:, :, ::-1] if flip else turned).tobytes() in views


@pytest.mark.parametrize(("views", "width"), [("all", 8), ("flip", 5), ("none", 5)])
def test_both_storages_hold_the_views(views, width):
    num_views, shape = augment.VIEW_COUNTS[views], (8, width, 3)
    originals = np.random.default_rng(0).integers(0, 256, (6, *shape), np.uint8)
    expanded = augment.expand(originals, num_views)
    for view in range(num_views):
        np.testing.assert_array_equal(expanded[:, view], augment.apply_view(originals, view))
    examples, labels = np.random.default_rng(1).permutation(6 * num_views), np.arange(6) + 10
    for storage, rows in (("expanded", expanded), ("on_device", originals)):
        shard = jax.tree.map(jnp.asarray, {"images": rows.reshape(-1, 8 * width * 3), "labels": labels})
        read = jax.jit(make_read(storage, shape, num_views, Classification(2)))
        images, found = read(shard, examples, examples.astype(np.uint32))
        np.testing.assert_array_equal(images, expanded.reshape(-1, *shape)[examples])
        np.testing.assert_array_equal(found, labels[examples // num_views])


@pytest.mark.parametrize(("num_views", "flips", "transposes"), [(8, 2, 1), (2, 1, 0), (1, 0, 0)])
def test_views_that_there_are_not_cost_nothing(num_views, flips, transposes):
    select = functools.partial(select_views, num_views=num_views)
    program = str(jax.make_jaxpr(select)(np.zeros((6, 8, 8, 3), np.uint8), np.zeros(6, np.int32)))
    assert (program.count(" rev["), program.count(" transpose[")) == (flips, transposes)


@pytest.mark.parametrize(("views", "num_examples"), [("all", 640), ("flip", 160), ("none", 80)])
def test_an_epoch_is_all_views_of_all_originals(small_config, views, num_examples):
    small_config.augment.views, small_config.batch.size = views, "full"
    plan = plan_run(typed(small_config), facts_of(80, (16, 16, 3)), Hardware.here(8))
    assert plan.num_examples == plan.schedule.batch_size_at(0) == num_examples
    small_config.batch.size = num_examples + 1
    with pytest.raises(BadSetting, match=f"from 1 to {num_examples}"):
        plan_run(typed(small_config), facts_of(80, (16, 16, 3)), Hardware.here(8))


@pytest.mark.parametrize(
    ("views", "over_views", "shift", "averages"),
    [
        ("flip", False, 0, []),
        ("all", True, 0, [{"num_views": 8, "shift": 0}]),
        ("flip", True, 1, [{"num_views": 2, "shift": 1}]),
        ("flip", False, 2, [{"num_views": 1, "shift": 2}]),
    ],
)
def test_a_run_averages_over_what_its_config_says(small_config, monkeypatch, views, over_views, shift, averages):
    small_config.augment.views, small_config.augment.storage = views, "on_device"
    small_config.eval.view_average, small_config.eval.shift_average = over_views, shift
    asked = []
    monkeypatch.setattr(augment, "average_over_copies", lambda *_, **options: asked.append(options))
    programs_of(plan_run(typed(small_config), facts_of(80, (16, 16, 3)), Hardware.here(8), "expanded"))
    assert asked == [{**average, "gives_maps": False} for average in averages]


def test_runs_of_other_views_have_other_data(small_config):
    keys = set()
    for views in augment.VIEW_COUNTS:
        small_config.augment.views = views
        keys.add(data_fields(typed(small_config)))
    assert len(keys) == 3


def test_images_that_are_not_square_have_no_transposed_views(small_config):
    expected = r"^augment\.views: 'all' with images of 24x16 pixels; allowed: flip \| none, or dataset\.image_size"
    with pytest.raises(BadSetting, match=expected):
        plan_run(typed(small_config), facts_of(80, (16, 24, 3)), Hardware.here(8))
    for views in ("flip", "none"):
        small_config.augment.views = views
        plan_run(typed(small_config), facts_of(80, (16, 24, 3)), Hardware.here(8))


def test_such_images_are_refused_before_a_build(small_config, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "set" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(path)
    small_config.dataset.update({"name": "wide", "path": str(tmp_path / "set"), "image_size": None})
    small_config.augment.cache_dir = str(tmp_path / "cache")
    with pytest.raises(BadSetting, match=r"^augment\.views: 'all' with images of 24x16 pixels"):
        augment.prepare_cache(typed(small_config))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("field", ["augment.shift", "eval.shift_average"])
def test_a_shift_by_the_size_of_an_image_is_refused(small_config, field):
    small_config.augment.views = "flip"
    small_config.update_from_flattened_dict({field: 16})
    with pytest.raises(BadSetting, match=rf"^{field}: 16; allowed: below 16, the size of an image$"):
        plan_run(typed(small_config), facts_of(80, (16, 24, 3)), Hardware.here(8))


def test_shifted_images_are_cut_from_reflected_ones_at_every_place():
    image = np.random.default_rng(0).integers(0, 256, (1, 8, 6, 3), np.uint8)
    visits = np.arange(500, dtype=np.uint32)
    shifted = np.asarray(jax.jit(random_augment.shifted, static_argnums=2)(np.repeat(image, 500, 0), visits, 2))
    padded = np.pad(image[0], ((2, 2), (2, 2), (0, 0)), mode="reflect")
    cuts = {padded[row : row + 8, column : column + 6].tobytes() for row in range(5) for column in range(5)}
    assert len(cuts) == 25
    assert {one.tobytes() for one in shifted} == cuts
    counts = np.unique(shifted.reshape(500, -1), axis=0, return_counts=True)[1]
    assert counts.min() >= 5  # of 20 expected: 3.4 standard deviations


def test_a_shift_as_large_as_the_image_is_refused(small_config, tmp_path):
    small_config.augment.shift = 16
    with pytest.raises(UserError, match=r"augment\.shift: 16; allowed: below 16"):
        train.train_and_evaluate(small_config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_set_that_does_not_fit_is_refused_with_the_numbers(small_config, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
    small_config.augment.storage = "expanded"
    with pytest.raises(UserError, match=r"training images .* MB .* MB needed, 0\.1 MB free.*on_device"):
        ProgramCache().load(typed(small_config))


@pytest.fixture
def fresh_cache(small_config, tmp_path):
    """A fresh cache of the small config, with its config."""
    small_config.augment.cache_dir = str(tmp_path / "caches")
    return small_config, augment.prepare_cache(typed(small_config)).folder


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def content_of(manifest: bytes) -> dict:
    """A manifest without what differs from build to build."""
    fields = json.loads(manifest)
    return {name: fields[name] for name in fields.keys() - {"build", "built", "manifest_sha256"}}


FILES = ["images-00000.raw", "crc32.npy", "labels.npy", "ids.npy", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip first", "flip last", "truncate", "remove"])
def test_a_damaged_cache_is_named_and_rebuilt(fresh_cache, name, damage, caplog):
    config, folder = fresh_cache
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = folder / name
    if damage == "truncate":
        path.write_bytes(sound[name][: len(sound[name]) // 2])
    elif damage == "remove":
        path.unlink()
    else:  # of the images a training image, and not a test image, which training does not read
        flip_byte(path, 500 if damage == "flip first" else -1 - 10 * 16 * 16 * 3 * (name == "images-00000.raw"))
    caplog.clear()
    ProgramCache().load(typed(config))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    damages = [text for text in warnings if text.startswith("damaged cache: ")]
    assert len(damages) == 1
    assert name in damages[0]
    again = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert content_of(again.pop("manifest.json")) == content_of(sound.pop("manifest.json"))
    assert again == sound


def test_the_command_verifies_the_test_images_too(fresh_cache, caplog, monkeypatch):
    config, folder = fresh_cache
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(preview=None, export=None))
    flip_byte(folder / "images-00000.raw", -1)
    augment.main(config)
    assert "images-00000.raw: its row 99 does not match its CRC-32; building it again" in caplog.text


def test_a_cache_that_is_damaged_again_is_an_error(fresh_cache, caplog):
    config, folder = fresh_cache
    caches = []

    def find_damage(cache):
        caches.append(cache)
        raise DamagedCache(f"{folder} is bad {len(caches)}")

    with pytest.raises(UserError, match=r"damaged again right after it was built: .* is bad 2"):
        augment.with_cache(typed(config), find_damage)
    assert len(caches) == 2
    assert caplog.text.count("is bad 1; building it again") == 1


def test_a_cache_of_another_version_is_rebuilt(fresh_cache, caplog, monkeypatch):
    config, _ = fresh_cache
    for module in ("cache", "cache_build"):
        monkeypatch.setattr(f"largebatch.data.{module}.CACHE_VERSION", CACHE_VERSION + 1)
    assert augment.prepare_cache(typed(config)).manifest["cache_version"] == CACHE_VERSION + 1
    assert f"is of cache version {CACHE_VERSION}, this is {CACHE_VERSION + 1}" in caplog.text


def test_a_sound_cache_is_used_as_it_is(fresh_cache, caplog, monkeypatch):
    config, folder = fresh_cache
    monkeypatch.setattr("augment.find_dataset", lambda *_, **__: pytest.fail("listed again"))
    assert augment.prepare_cache(typed(config)).folder == folder
    assert ProgramCache().load(typed(config)).data.cache.folder == folder


def test_a_killed_build_leaves_nothing_under_the_final_name(small_config, tmp_path, monkeypatch):
    small_config.augment.cache_dir = str(tmp_path / "caches")
    monkeypatch.setattr(
        "largebatch.data.cache_build.channel_statistics", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        augment.prepare_cache(typed(small_config))
    (left,) = (tmp_path / "caches").iterdir()
    assert left.name.startswith(".")


def test_what_shapes_the_cache_changes_its_folder(small_config, tmp_path, monkeypatch):
    def folder(fields: dict) -> str:
        config = small_config.copy_and_resolve_references()
        config.update_from_flattened_dict({"dataset.image_size": 16} | fields)  # which resize needs
        return augment.CacheRequest.of(typed(config)).folder("0" * 64).name

    others = (
        {"dataset.name": "scenes"},
        {"dataset.source": "folder"},
        {"dataset.path": str(tmp_path)},
        {"dataset.splits": "own"},
        {"dataset.split_seed": 1},
        {"dataset.num_examples": 99},
        {"dataset.image_size": 8},
        {"dataset.resize": "crop"},
        {"dataset.channels": 3},
        {"dataset.tfds_split": "train"},
        {"task.name": "depth", "model.name": "unet_tiny"},
    )
    folders = {folder({}), *map(folder, others)}
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    folders.add(folder({}))
    assert len(folders) == len(others) + 2
    other_fields = {"dataset.max_image_pixels": 10**6, "seed": 5, "augment.cache_dir": str(tmp_path)}
    assert folder(other_fields) == folder({})


def test_a_host_that_has_the_cache_others_lack_does_not_say_that_files_changed(fresh_cache, caplog, monkeypatch):
    config, _ = fresh_cache
    augment.prepare_cache(typed(config))
    monkeypatch.setattr(augment, "_all_have", lambda cache: False)
    assert augment.plan_cache(typed(config)) is not None
    assert "changed since" not in caplog.text


def test_command_builds_the_cache_and_draws_the_views(tmp_path):
    preview = tmp_path / "views.png"
    arguments = ["augment.py", "--config.augment.cache_dir", tmp_path / "c", "--config.dataset.num_examples", "50"]
    result = run_script(*arguments, "--preview", preview)
    assert result.returncode == 0, result.stderr
    assert "40 train, 5 val, 5 test; training set 320 views" in result.stdout
    sheet = np.asarray(Image.open(preview))
    tile = sheet[:64, :64][::2, ::2]
    next_tile = sheet[:64, 68 : 68 + 64][::2, ::2]
    np.testing.assert_array_equal(next_tile, tile[:, ::-1])


def test_the_command_refuses_views_that_images_do_not_have(tmp_path):
    folder, preview = make_folder(tmp_path / "images", {"a": 20, "b": 20}, size=(24, 16)), tmp_path / "views.png"
    command = ["augment.py", "--config.dataset.name=mine", "--config.dataset.path", folder, "--preview", preview]
    command += ["--config.augment.cache_dir", tmp_path / "c"]
    result = run_script(*command, "--config.augment.views=flip")
    assert result.returncode == 0, result.stderr
    preview.unlink()
    assert_one_line_error(run_script(*command), "augment.views: 'all' with images of 16x24 pixels")
    assert not preview.exists()


def test_cache_folder_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run_script("augment.py", "--config.augment.cache_dir", blocked / "cache")
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 1
    assert len(errors) == 1
    assert "augment.cache_dir: cannot write" in errors[0]
    assert "Traceback" not in result.stderr


def test_no_space_leaves_no_cache(small_config, tmp_path, monkeypatch):
    small_config.augment.cache_dir = str(tmp_path / "caches")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("largebatch.data.cache_images._write_file", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        augment.prepare_cache(typed(small_config))
    assert list((tmp_path / "caches").iterdir()) == []


def test_a_preview_that_cannot_be_written(tmp_path):
    flags = ["--config.augment.cache_dir", tmp_path / "c", "--config.dataset.num_examples", "50"]
    for path, word in ((tmp_path / "no" / "x.png", "No such file"), (tmp_path / "x.foo", "unknown file extension")):
        result = run_script("augment.py", *flags, "--preview", path)
        assert result.returncode == 1
        assert f"--preview: cannot write {path}" in result.stderr.splitlines()[-1]
        assert word in result.stderr.splitlines()[-1]


def test_bad_flags_of_the_command():
    assert_one_line_error(run_script("augment.py", "--previw", "x.png"), "previw", code=2)

"""Views of images, and the cache of a config: what it depends on, and what becomes of a damaged one."""

import functools
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from conftest import facts_of, make_folder, typed
from PIL import Image

import augment
from build import ProgramCache
from largebatch.data.cache import CACHE_VERSION, DamagedCache, seal
from largebatch.hardware.chips import Hardware
from largebatch.hosts import memory
from largebatch.tasks.task import Classification
from largebatch.training.views import make_read, select_views
from largebatch.util import BadSetting, UserError
from plan import plan_run

# ---- views -----------------------------------------------------------------------------------------------


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


# ---- what does not go together -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"augment\.views: 'all' with images of 24x16 pixels; allowed: flip \| none, or dataset\.image_size"),
        ({"augment.shift": 16}, r"augment\.shift: 16; allowed: below 16, the size of an image$"),
        ({"augment.cutout": 17}, r"augment\.cutout: 17; allowed: up to 16, the size of an image$"),
        ({"eval.shift_average": 16}, r"eval\.shift_average: 16; allowed: below 16, the size of an image$"),
    ],
)
def test_images_that_are_too_small_or_not_square_are_refused_before_a_build(
    small_config, tmp_path, fields, message
):
    config = small_config
    config.dataset.name, config.dataset.image_size = "wide", None
    config.dataset.path = str(make_folder(tmp_path / "set", {"a": 10, "b": 10}, size=(16, 24)))
    config.augment.views, config.augment.cache_dir = "flip" if fields else "all", str(tmp_path / "cache")
    config.update_from_flattened_dict(fields)
    for refuse in (
        augment.prepare_cache,
        lambda config: plan_run(config, facts_of(80, (16, 24, 3)), Hardware.here(8)),
    ):
        with pytest.raises(BadSetting, match=f"^{message}"):
            refuse(typed(config))
    assert not (tmp_path / "cache").exists()


def test_a_set_that_does_not_fit_is_refused_with_the_numbers(small_config, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
    small_config.augment.storage = "expanded"
    with pytest.raises(UserError, match=r"training images .* MB .* MB needed, 0\.1 MB free.*on_device"):
        ProgramCache().load(typed(small_config))


# ---- the cache ---------------------------------------------------------------------------------------------


def test_what_shapes_the_cache_changes_its_folder(small_config, tmp_path, monkeypatch):
    def folder(fields: dict) -> str:
        config = small_config.copy_and_resolve_references()
        config.update_from_flattened_dict({"dataset.image_size": 16} | fields)  # which resize needs
        return augment.CacheRequest.of(typed(config)).prefix

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
    monkeypatch.setattr("largebatch.data.sources.scenes.SCENES_VERSION", 0)
    folders.add(folder({"dataset.name": "scenes"}))
    for content in ("id,split\na,train", "id,split\na,test"):
        (tmp_path / "split.csv").write_text(content)
        folders.add(folder({"dataset.split_file": str(tmp_path / "split.csv")}))
    assert len(folders) == len(others) + 5
    other_fields = {"dataset.max_image_pixels": 10**6, "seed": 5, "augment.cache_dir": str(tmp_path)}
    assert folder(other_fields) == folder({})


@pytest.fixture
def fresh_cache(small_config, tmp_path):
    """A fresh cache of the small config, with its config."""
    small_config.augment.cache_dir = str(tmp_path / "caches")
    return small_config, augment.prepare_cache(typed(small_config)).folder


def content_of(manifest: bytes) -> dict:
    """A manifest without what differs from build to build."""
    fields = json.loads(manifest)
    return {name: fields[name] for name in fields.keys() - {"build", "built", "manifest_sha256"}}


DAMAGE = {
    "flip first": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "flip last": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "truncate": lambda content: content[: len(content) // 2],
    "remove": None,
}
FILES = ["images-00000.raw", "crc32.npy", "labels.npy", "ids.npy", "manifest.json"]
MANIFESTS = {"[]": b"[]", "version 1": seal({"cache_version": 1})}


@pytest.mark.parametrize(
    ("name", "damage"), [*itertools.product(FILES, DAMAGE), *(("manifest.json", kind) for kind in MANIFESTS)]
)
def test_a_damaged_cache_is_named_and_rebuilt(fresh_cache, name, damage, caplog, monkeypatch):
    """The command verifies every byte."""
    config, folder = fresh_cache
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(preview=None, export=None))
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage == "remove":
        (folder / name).unlink()
    else:
        damaged = MANIFESTS[damage] if damage in MANIFESTS else DAMAGE[damage](sound[name])
        (folder / name).write_bytes(damaged)
    caplog.clear()
    augment.main(config)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (told,) = [text for text in warnings if text.startswith("damaged cache: ")]
    assert name in told
    assert damage != "version 1" or f"is of cache version 1, this is {CACHE_VERSION}" in told
    again = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert content_of(again.pop("manifest.json")) == content_of(sound.pop("manifest.json"))
    assert again == sound


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


def test_a_split_file_may_leave_out_a_damaged_first_image(small_config, tmp_path):
    folder = make_folder(tmp_path / "set", {"a": 4, "b": 4})
    (folder / "a" / "a_0.png").write_bytes(b"no image")
    rows = [
        f"{name}/{name}_{number},{('train', 'train', 'val', 'test')[number]}"
        for name in "ab"
        for number in range(4)
    ]
    (tmp_path / "split.csv").write_text("\n".join(["id,split", *rows[1:]]))
    small_config.dataset.update({"name": "mine", "path": str(folder), "split_file": str(tmp_path / "split.csv")})
    small_config.dataset.image_size, small_config.augment.cache_dir = None, str(tmp_path / "caches")
    cache = augment.prepare_cache(typed(small_config))
    assert cache.split("train").ids.tolist() == ["a/a_1.png", "b/b_0.png", "b/b_1.png"]


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command_builds_the_cache_and_draws_the_views(small_config, tmp_path, monkeypatch, capsys):
    preview, small_config.augment.cache_dir = tmp_path / "views.png", str(tmp_path / "caches")
    monkeypatch.setattr(flags, "FLAGS", types.SimpleNamespace(preview=str(preview), export=None))
    augment.main(small_config)
    assert "80 train, 10 val, 10 test; training set 640 views" in capsys.readouterr().out
    sheet = np.asarray(Image.open(preview))
    tile, next_tile = (sheet[:32, left : left + 32][::2, ::2] for left in (0, 36))
    np.testing.assert_array_equal(next_tile, tile[:, ::-1])


def test_a_cache_folder_that_cannot_be_written_is_named(small_config, tmp_path):
    (tmp_path / "file").write_text("")
    small_config.augment.cache_dir = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match=r"^augment\.cache_dir: cannot write"):
        augment.prepare_cache(typed(small_config))


@pytest.mark.parametrize(("views", "num_examples"), [("all", 640), ("flip", 160), ("none", 80)])
def test_an_epoch_is_all_views_of_all_originals(small_config, views, num_examples):
    small_config.augment.views, small_config.batch.size = views, "full"
    plan = plan_run(typed(small_config), facts_of(80, (16, 16, 3)), Hardware.here(8))
    assert plan.num_examples == plan.schedule.batch_size_at(0) == num_examples
    small_config.batch.size = num_examples + 1
    with pytest.raises(BadSetting, match=f"from 1 to {num_examples}"):
        plan_run(typed(small_config), facts_of(80, (16, 16, 3)), Hardware.here(8))

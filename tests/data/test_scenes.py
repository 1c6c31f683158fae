"""The scenes: exact, and from a seed."""

import numpy as np
import pytest
from conftest import decode_all, find_set, make_folder

from largebatch.data.sources.scenes import (
    BACKGROUND_PATTERNS,
    OBJECT_PATTERNS,
    SCENES_VERSION,
    make_scene,
    patterns,
)
from largebatch.tasks import planes

SIZE, NUM_SCENES = 48, 30
TEXTURES = patterns(BACKGROUND_PATTERNS), patterns(OBJECT_PATTERNS)


@pytest.fixture(scope="module")
def scenes():
    return [make_scene(SIZE, (0, number), *TEXTURES) for number in range(NUM_SCENES)]


def test_depths_are_those_of_a_floor_and_a_wall(scenes):
    """A pinhole camera sees one over the depth fall evenly with the row below the horizon, and the wall above."""
    for scene in scenes:
        assert 0 < scene.depth.min() <= scene.depth.max() <= 1
        empty_columns = np.flatnonzero(~scene.mask.any(axis=0))
        for column in empty_columns[:3]:
            inverse = 1 / scene.depth[:, column]
            steps = np.diff(inverse)
            is_floor = steps > 1e-9
            assert not is_floor[0]
            np.testing.assert_allclose(steps[is_floor][1:], steps[is_floor][-1], rtol=1e-6)


def test_a_seed_gives_the_same_scene_in_later_versions():
    """A change of the scenes needs another `SCENES_VERSION`."""
    scene = make_scene(SIZE, (0, 0), *TEXTURES)
    assert SCENES_VERSION == 5
    assert scene.mask.sum() == 1092
    assert scene.depth[[0, 24, 47], [0, 24, 47]] == pytest.approx([0.621404, 0.196438, 0.152267], abs=1e-6)
    assert scene.image.mean() == pytest.approx(152.95, abs=0.01)


def test_a_set_of_scenes_has_disjoint_seeds_and_swapped_textures():
    whole, fewer, swapped = (
        find_set(name, num_examples=count, image_size=16)
        for name, count in (("scenes", 60), ("scenes", 50), ("scenes_swapped", 60))
    )
    assert [whole.splits.count(split) for split in ("train", "val", "test")] == [48, 6, 6]
    assert len(set(whole.ids)) == 60
    assert set(fewer.ids) < set(whole.ids)
    assert (whole.targets.classes, whole.targets.planes) == (("background", "object"), 3)
    stored, of_swapped = decode_all(whole), decode_all(swapped)
    np.testing.assert_array_equal(decode_all(fewer)[0], stored[0])
    assert not np.array_equal(stored[..., :3], of_swapped[..., :3])
    expected = make_scene(16, (0, 3), *TEXTURES)
    np.testing.assert_array_equal(planes.classes_of(stored[3][..., 3:]), expected.mask)
    np.testing.assert_allclose(planes.depths_of(stored[3][..., 3:]), expected.depth, atol=1e-5)


def test_scenes_stand_on_the_images_that_are_given(tmp_path):
    folder = make_folder(tmp_path / "images", {"red": 10, "blue": 10})
    source = find_set("scenes", folder, num_examples=50, image_size=16)
    assert str(folder) in source.description
    assert not np.array_equal(decode_all(source), decode_all(find_set("scenes", num_examples=50, image_size=16)))

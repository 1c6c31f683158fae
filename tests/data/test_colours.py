import numpy as np
import pytest

from largebatch.data.pictures import to_rgb8


def test_grey_and_rgb_of_8_bits_stay_as_they_are():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(to_rgb8(pixels), pixels)
    np.testing.assert_array_equal(to_rgb8(pixels[..., :1]), np.repeat(pixels[..., :1], 3, axis=-1))


@pytest.mark.parametrize(
    ("channels", "bands"),
    [(13, (3, 2, 1)), (12, (3, 2, 1)), (10, (2, 1, 0)), (4, (0, 1, 2)), (7, (0, 1, 2)), (2, (0, 0, 0))],
)
def test_red_green_and_blue_are_the_bands_they_should_be(channels, bands):
    """Band b is b + 1 at one place and 0 elsewhere; the brightest of the three comes out white."""
    pixels = np.zeros((4, channels, channels), np.uint16)
    for band in range(channels):
        pixels[:, band, band] = 1000
    shown = to_rgb8(pixels)
    for colour, band in enumerate(bands):
        expected = np.zeros(channels, np.uint8)
        expected[band] = 255
        np.testing.assert_array_equal(shown[0, :, colour], expected)
    other = to_rgb8(pixels, bands=(1, 0, 1))
    np.testing.assert_array_equal(other[0, 0], [0, 255, 0])


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint16), (3, np.uint16), (4, np.uint8), (13, np.uint16)])
@pytest.mark.parametrize("level", [30, 150])
def test_pictures_are_neither_black_nor_clipped(channels, dtype, level):
    """Values in a narrow range, as reflectances have, with one glint."""
    pixels = np.random.default_rng(0).normal(level, level / 10, (64, 64, channels))
    pixels[0, 0] = np.iinfo(dtype).max
    shown = to_rgb8(np.clip(pixels, 0, np.iinfo(dtype).max).astype(dtype))
    assert shown.shape == (64, 64, 3)
    assert shown.dtype == np.uint8
    assert 90 < shown.mean() < 165
    assert 40 < shown.std() < 80
    assert np.isin(shown, (0, 255)).mean() < 0.06


def test_colours_keep_their_relation():
    """A red picture is red: bands are not stretched one by one."""
    pixels = np.random.default_rng(0).integers(100, 200, (16, 16, 3), np.uint16)
    pixels[..., 0] += 800
    shown = to_rgb8(pixels)
    assert shown[..., 0].min() > shown[..., 1:].max()


def test_a_picture_of_one_colour_has_it():
    assert set(to_rgb8(np.full((4, 4, 3), 32768, np.uint16)).ravel()) == {128}
    assert set(to_rgb8(np.full((4, 4, 13), 51, np.uint8)).ravel()) == {51}

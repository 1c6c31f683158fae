"""What the doctor says beforehand of the time and disk that building a cache will take."""

import numpy as np
import pytest
from etils import epath

from largebatch.data.cache_build import build_together
from largebatch.data.cache_images import BuildEstimate, CachePlan, estimate_build
from largebatch.data.dataset import dataset_of_files
from largebatch.doctor import check_build
from largebatch.util import UserError


def plan_of(folder, decode) -> CachePlan:
    """A set of 80 images that is not built."""
    ids, parts = [f"{number:02d}" for number in range(80)], np.split(np.arange(80), [64, 72])
    dataset = dataset_of_files("noise", ids, np.arange(80) % 5, list("abcde"), decode)
    return CachePlan(
        epath.Path(folder) / "small-0123", dataset, dict(zip(("train", "val", "test"), parts, strict=True))
    )


def noise(some, out) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 256, (32, 48, 3), np.uint8) for number in some]


def test_an_estimate_has_the_size_of_the_cache_that_is_built(tmp_path):
    plan = plan_of(tmp_path / "caches", noise)
    estimate = estimate_build(plan)
    assert not plan.folder.parent.exists()  # nothing was written
    build_together(plan)
    on_disk = sum(path.stat().length for path in plan.folder.iterdir())
    assert on_disk == pytest.approx(estimate.disk_bytes, rel=0.25)
    assert estimate.sampled == 80
    assert estimate.seconds == pytest.approx(80 / estimate.images_per_sec)


def test_a_damaged_image_of_the_sample_is_named(tmp_path):
    def decode(some, out):
        if 75 in some:
            raise UserError("75: damaged")
        return noise(some, out)

    with pytest.raises(UserError, match="75: damaged"):
        estimate_build(plan_of(tmp_path, decode))


@pytest.mark.parametrize(("free", "status"), [(2_000_000, "ok"), (1_000, "fail")])
def test_the_doctor_compares_the_size_with_the_room_that_there_is(tmp_path, free, status):
    estimate = BuildEstimate(plan_of(tmp_path, noise), 400_000, free, images_per_sec=2.0, sampled=10)
    finding = check_build(estimate)
    assert finding.status == status
    assert finding.text.startswith(
        "80 images of 32x48x3 uint8: 0.00 GB on disk, about 40 s to build, at 2 images/s"
    )

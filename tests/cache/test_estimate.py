"""What is said of a data set before its cache is built, beside what the cache then is."""

import contextlib
import dataclasses

import numpy as np
import pytest
from conftest import decode_all
from etils import epath

from largebatch.cache.build import build_cache
from largebatch.cache.cache import open_cache
from largebatch.cache.estimate import BuildEstimate, estimate_build
from largebatch.cache.finish import finish_cache
from largebatch.cache.plan import CachePlan, make_layout
from largebatch.doctor.findings import check_build
from largebatch.sources.find import find_source
from largebatch.sources.split import split_indices
from largebatch.util import UserError


@pytest.fixture
def plan(tmp_path) -> CachePlan:
    """Of a set that is not built."""
    source = find_source("synthetic", num_examples=80)
    return CachePlan(epath.Path(tmp_path) / "caches" / "small-0123", source, split_indices(source.ids, 0))


def test_an_estimate_has_the_layout_and_the_size_of_the_cache_that_is_built(plan):
    estimate = estimate_build(plan)
    assert not plan.folder.parent.exists()  # nothing was written
    build_cache(plan)
    finish_cache(plan)
    assert open_cache(plan.folder).layout == estimate.layout
    on_disk = sum(path.stat().length for path in plan.folder.iterdir())
    assert on_disk == pytest.approx(estimate.disk_bytes, rel=0.25)
    assert (estimate.num_images, estimate.num_classes, estimate.sampled) == (80, 5, 80)
    assert estimate.seconds == pytest.approx(80 / estimate.images_per_sec)


def test_a_damaged_image_of_the_sample_is_named(plan):
    pixels = decode_all(plan.source).images
    damaged = plan.splits["val"][0]

    def read(indices, out=None):
        if damaged in indices:
            raise UserError(f"{plan.source.ids[damaged]}: damaged")
        return [pixels[index] for index in indices]

    source = dataclasses.replace(plan.source, open=lambda: contextlib.nullcontext(read))
    with pytest.raises(UserError, match=plan.source.ids[damaged]):
        estimate_build(dataclasses.replace(plan, source=source))


def test_a_full_disk_is_told_by_the_room_that_there_is(plan, monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
        assert estimate_build(plan).sampled == 80


@pytest.mark.parametrize(("free", "status"), [(2_000_000, "ok"), (1_000, "fail"), (None, "warn")])
def test_the_doctor_compares_the_size_with_the_room_that_there_is(free, status):
    layout = make_layout({"train": 8, "val": 1, "test": 1}, (32, 48, 13), np.dtype(np.uint16))
    finding = check_build(BuildEstimate(layout, 3, 400_000, free, images_per_sec=2.0, sampled=10))
    assert finding.status == status
    assert finding.text.startswith(
        "10 images of 32x48x13 uint16: 0.00 GB on disk, about 5 s to build, at 2 images/s"
    )

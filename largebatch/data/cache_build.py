"""Build of a cache on all hosts, and its last stage: arrays, manifest, name."""

import contextlib
import datetime
import hashlib
import io
import json
import logging
import uuid
from pathlib import Path

import jax
import numpy as np

from largebatch import util
from largebatch.data.cache import CACHE_VERSION, MANIFEST, Cache, DamagedCache, open_cache, seal
from largebatch.data.cache_images import PARTS, CachePlan, build_files, cannot_write, total, write_whole
from largebatch.data.dataset import SPLITS
from largebatch.hosts import collectives
from largebatch.util import UserError

log = logging.getLogger("largebatch")


def build_together(plan: CachePlan | None) -> None:
    """Build a cache where it is missing; hosts that see the same folder share the work. Collective.

    Args:
      plan: plan of the cache; None on a host that has it.
    Raises:
      UserError: on every host, if one of them fails; see `build_files`.
    """
    builders = _hosts_with_folder(plan)
    rank = builders.index(jax.process_index()) if plan else 0
    collectives.agreed(lambda: build_files(plan, rank, len(builders)), plan is not None)
    collectives.agreed(lambda: finish_cache(plan), plan is not None and rank == 0)


def _hosts_with_folder(plan: CachePlan | None) -> list[int]:
    """Return the hosts that build in the build folder that this host sees, itself included. Collective."""
    token, here, found = collectives.gather_text(uuid.uuid4().hex)[0], jax.process_index(), []

    def mark(host: int) -> Path:
        # A name that `util.remove_stale_in` removes.
        return plan.folder.parent / f".{plan.folder.name}.host-{host}.{token}.tmp"

    def leave_mark() -> None:
        try:
            plan.folder.parent.mkdir(parents=True, exist_ok=True)
            mark(here).touch()
        except OSError as error:
            raise cannot_write(plan, error) from error

    collectives.agreed(leave_mark, plan is not None)
    if plan:
        found = [host for host in range(jax.process_count()) if host == here or mark(host).exists()]
    collectives.barrier()  # all hosts have looked
    if plan:
        util.remove(mark(here))
    return found


# ---- the last stage ------------------------------------------------------------------------------------


def finish_cache(plan: CachePlan) -> None:
    """Write labels, ids, CRCs and the manifest of a cache whose images files are there, and give it its name.

    Raises:
      UserError: a part record is damaged; all masks are of one class; a failing disk.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    if plan.missing:  # a network file system showed the marks of hosts to some of them
        build_files(plan)
    try:
        manifest = _write_arrays(plan)
        write_whole(plan.build_folder / MANIFEST, seal(manifest))
        plan.build_folder.rename(plan.folder)
        util.remove(plan.folder / PARTS)
        for path in plan.folder.glob(".*"):  # files of killed processes, or of slower ones that build the same
            util.remove(path)
    except OSError as error:
        if not plan.folder.exists():
            raise cannot_write(plan, error) from error
        with contextlib.suppress(OSError):  # another process was first, with the same content
            util.remove(plan.build_folder)
    log.info("cached in %s", plan.folder)
    with contextlib.suppress(DamagedCache):  # which whoever reads the images will report
        _warn_of_equal_images(open_cache(plan.folder))


def _write_arrays(plan: CachePlan) -> dict:
    """Write ids, labels and CRCs of all rows; return the manifest."""
    dataset, layout, sha256 = plan.dataset, plan.layout, {}
    records = [_read_record(plan, number) for number in range(layout.num_files)]
    crcs = np.array([crc for record in records for crc in record["crcs"]], np.uint32)
    arrays = {"ids": np.array(dataset.ids)[plan.examples], "labels": dataset.labels[plan.examples], "crc32": crcs}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        write_whole(plan.build_folder / f"{name}.npy", buffer.getvalue())
        sha256[name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    sums, square_sums = (total([record[name] for record in records]) for name in ("sums", "square_sums"))
    num_pixels = layout.counts["train"] * layout.image_shape[0] * layout.image_shape[1]
    _refuse_one_class(plan, sums, square_sums, num_pixels)
    mean, std = channel_statistics(sums, square_sums, num_pixels)
    return {
        "cache_version": CACHE_VERSION,
        "build": uuid.uuid4().hex,  # so that no two builds have the same manifest; see `cache.discard_cache`
        "built": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "source": dataset.description,
        "counts": layout.counts,
        "class_names": dataset.class_names,
        "image_shape": list(layout.image_shape),
        "image_dtype": layout.dtype.name,
        "rows_per_file": layout.rows_per_file,
        "mean": mean,
        "std": std,
        "sha256": sha256,
        **dataset.targets.record(),
    }


def _read_record(plan: CachePlan, number: int) -> dict:
    path = plan.record_path(number)
    try:
        record = json.loads(path.read_text())
        if len(record["crcs"]) != len(plan.layout.rows_of_file(number)):
            raise ValueError(f"{len(record['crcs'])} rows")
        return record
    except (ValueError, LookupError, TypeError) as error:
        path.unlink(missing_ok=True)  # so that the next start decodes this part again
        raise UserError(f"augment.cache_dir: {path} is damaged ({error}); start again to build it anew") from error


def _refuse_one_class(plan: CachePlan, sums: list[int], square_sums: list[int], num_pixels: int) -> None:
    """Raise UserError if all pixels of the training masks are of one class: then nothing can be learned."""
    targets = plan.dataset.targets
    total, squares = sums[-targets.planes], square_sums[-targets.planes]
    if not targets.classes or total**2 != num_pixels * squares:
        return
    util.remove(plan.build_folder)
    raise UserError(
        f"dataset: all pixels of the training masks of {plan.dataset.description} are of class "
        f"{targets.classes[total // num_pixels]!r}; allowed: two classes or more"
    )


def channel_statistics(sums: list[int], square_sums: list[int], num_pixels: int) -> tuple[list, list]:
    """Return mean and standard deviation by channel, from exact integer sums over `num_pixels` pixels.

    Python's integers do not overflow, and its division rounds once. The deviation is at least 1.
    """
    mean = [total / num_pixels for total in sums]
    variance = [squares / num_pixels - m**2 for squares, m in zip(square_sums, mean, strict=True)]
    return mean, [float(np.sqrt(max(v, 1.0))) for v in variance]


def _warn_of_equal_images(cache: Cache) -> None:
    """Warn of images with the same pixels; a pair in two splits makes the validation too optimistic.

    Only images of equal CRC-32 are read again and compared, so no other hash has to be computed or kept.
    """
    crcs, layout, pairs, equal_crc = cache.array("crc32"), cache.layout, [], {}
    order = np.argsort(crcs, kind="stable")
    repeats = np.flatnonzero(np.diff(crcs[order]) == 0)
    image = np.empty((1, *layout.image_shape), layout.dtype)
    for place in np.union1d(repeats, repeats + 1):
        row = order[place]
        cache.fill(np.array([row]), image, num_threads=1)
        if place == 0 or crcs[order[place - 1]] != crcs[row]:
            equal_crc = {}
        before = equal_crc.setdefault(image.tobytes(), row)
        if before != row:
            pairs.append((before, row))
    if not pairs:
        return
    split_of, ids = np.repeat(SPLITS, [layout.counts[split] for split in SPLITS]), cache.array("ids")
    across = [pair for pair in pairs if split_of[pair[0]] != split_of[pair[1]]]
    shown = [f"{ids[one]} = {ids[other]}" for one, other in (across or pairs)[:3]]
    log.warning(
        "dataset: images with the same pixels as another one: %d, in another split: %d (%s)",
        len(pairs),
        len(across),
        ", ".join(shown) + (", ..." if len(across or pairs) > 3 else ""),
    )

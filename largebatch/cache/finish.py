"""Puts the parts of a cache together: labels, ids, digests, statistics and the manifest."""

import contextlib
import datetime
import hashlib
import io
import json
import logging
import uuid

import numpy as np

from largebatch import files
from largebatch.cache.cache import CACHE_VERSION, MANIFEST, RowLayout, seal_of
from largebatch.cache.parts import read_record, write_whole
from largebatch.cache.plan import PARTS, CachePlan, FileTask, plan_layout
from largebatch.errors import UserError
from largebatch.sources.split import SPLITS

log = logging.getLogger("largebatch")


def finish_cache(plan: CachePlan) -> None:
    """Puts the written parts together and gives the cache its name.

    Raises:
      UserError: a failing disk.
    """
    build = plan.build_folder
    layout = plan_layout(plan)
    try:
        manifest = _write_small_arrays(plan, layout)
        manifest["manifest_sha256"] = seal_of(manifest)
        write_whole(build / MANIFEST, json.dumps(manifest, indent=1).encode())
        build.rename(plan.folder)
        files.remove(plan.folder / PARTS)
        for path in plan.folder.glob(".*"):  # of processes that were killed, or build the same and come second
            files.remove(path)
    except OSError as error:
        if not plan.folder.exists():
            raise UserError(f"augment.cache_dir: cannot write {plan.folder} ({error.strerror or error})") from error
        with contextlib.suppress(OSError):  # another process was first, with the same content
            files.remove(build)
    log.info("cached in %s", plan.folder)


def _write_small_arrays(plan: CachePlan, layout: RowLayout) -> dict:
    """Writes labels, ids and digests of every split; returns the manifest."""
    source, sha256, digests_of_split = plan.source, {}, {}
    ids = np.array(source.ids)
    channels = layout.image_shape[-1]
    sums, square_sums = [0] * channels, [0] * channels
    for split in SPLITS:
        records = [
            read_record(plan, FileTask(split, number), len(layout.rows_of_file(split, number)))
            for number in range(layout.num_files(split))
        ]
        if split == "train":
            for channel in range(channels):
                sums[channel] = sum(int(record["sums"][channel]) for record in records)
                square_sums[channel] = sum(int(record["square_sums"][channel]) for record in records)
        digests = np.concatenate([np.empty((0, 32), np.uint8), *(record["digests"] for record in records)])
        digests_of_split[split] = digests
        rows = plan.splits[split]
        for name, array in {"labels": source.labels[rows], "ids": ids[rows], "digests": digests}.items():
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            path = plan.build_folder / f"{split}_{name}.npy"
            write_whole(path, buffer.getvalue())
            sha256[path.name] = hashlib.sha256(buffer.getvalue()).hexdigest()
    _warn_of_equal_images(plan, digests_of_split)
    num_pixels = layout.counts["train"] * layout.image_shape[0] * layout.image_shape[1]
    mean, std = channel_statistics(sums, square_sums, num_pixels)
    return {
        "cache_version": CACHE_VERSION,
        "build": uuid.uuid4().hex,  # so that no two builds have the same manifest; see `discard_cache`
        "built": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "source": source.description,
        "counts": layout.counts,
        "class_names": source.class_names,
        "image_shape": list(layout.image_shape),
        "image_dtype": layout.dtype.name,
        "rows_per_file": layout.rows_per_file,
        "mean": mean,
        "std": std,
        "sha256": sha256,
    }


def channel_statistics(sums: list[int], square_sums: list[int], num_pixels: int) -> tuple[list, list]:
    """Mean and standard deviation by channel, from exact integer sums over `num_pixels` pixels.

    Python's integers do not overflow, and its division rounds once. The deviation is at least 1.
    """
    mean = [total / num_pixels for total in sums]
    variance = [squares / num_pixels - m**2 for squares, m in zip(square_sums, mean, strict=True)]
    return mean, [float(np.sqrt(max(v, 1.0))) for v in variance]


def _warn_of_equal_images(plan: CachePlan, digests: dict[str, np.ndarray]) -> None:
    """Counts and names images with the same pixels; those in two splits make a validation too good."""
    every = np.ascontiguousarray(np.concatenate([digests[split] for split in SPLITS])).view("V32").ravel()
    examples = np.concatenate([plan.splits[split] for split in SPLITS])
    split_of = np.repeat(np.arange(len(SPLITS)), [len(digests[split]) for split in SPLITS])
    order = np.argsort(every, kind="stable")
    equals_next = every[order[:-1]] == every[order[1:]]
    if not equals_next.any():
        return
    first, second = order[:-1][equals_next], order[1:][equals_next]
    in_two_splits = split_of[first] != split_of[second]
    shown = np.flatnonzero(in_two_splits) if in_two_splits.any() else np.arange(len(first))
    ids = plan.source.ids
    pairs = [f"{ids[examples[first[k]]]} = {ids[examples[second[k]]]}" for k in shown[:3]]
    log.warning(
        "dataset: %d images have the same pixels as another one, %d of them in another split (%s)",
        len(first),
        in_two_splits.sum(),
        ", ".join(pairs) + (", ..." if len(shown) > 3 else ""),
    )

"""Part records of a cache that is being built, and the last stage of a build: arrays, manifest, name."""

import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import logging
import uuid

import numpy as np
from etils import epath

from largebatch import util
from largebatch.cache.cache import CACHE_VERSION, MANIFEST, RowLayout, seal_of
from largebatch.cache.plan import PARTS, CachePlan, FileTask, plan_layout
from largebatch.sources.split import SPLITS
from largebatch.util import UserError

log = logging.getLogger("largebatch")

MOST_LINES = (2**32 - 1) // 255**2  # so many squares of uint8 add up to what fits into uint32


@dataclasses.dataclass(frozen=True)
class Block:
    """Decoded rows with their digests and sums, which go into a part record."""

    pixels: np.ndarray  # [rows, H, W, C]
    digests: np.ndarray  # uint8 [rows, 32]
    sums: np.ndarray  # uint64 [rows, C]: of the pixels
    square_sums: np.ndarray  # uint64 [rows, C]: of their squares


def channel_sums(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return exact sums of the pixels [N, H, W, C] and of their squares by image and channel: uint64 [N, C] each.

    Lines are added first, all channels at once, which is much quicker than channel by channel.
    """
    num_images, height, width, channels = pixels.shape
    lines = pixels.reshape(num_images, height, width * channels)
    fits = pixels.dtype == np.uint8 and height <= MOST_LINES
    number_type = np.uint32 if fits else np.uint64
    line_sums = np.add.reduce(lines, axis=1, dtype=number_type)
    line_square_sums = np.einsum("nlx,nlx->nx", lines, lines, dtype=number_type)
    by_channel = (num_images, width, channels)
    sums = line_sums.reshape(by_channel).sum(axis=1, dtype=np.uint64)
    square_sums = line_square_sums.reshape(by_channel).sum(axis=1, dtype=np.uint64)
    return sums, square_sums


def part_record(blocks: list[Block]) -> bytes:
    """Return the part record of the images file that these blocks make up."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        digests=np.concatenate([block.digests for block in blocks]),
        sums=np.concatenate([block.sums for block in blocks]),
        square_sums=np.concatenate([block.square_sums for block in blocks]),
    )
    return buffer.getvalue()


def read_record(plan: CachePlan, task: FileTask, num_rows: int) -> dict[str, np.ndarray]:
    """Read the digests and sums of the rows of an images file.

    Raises:
      UserError: the record is damaged, or of another layout, as of another version of the code.
    """
    path = plan.build_folder / task.record
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            record = {name: arrays[name] for name in ("digests", "sums", "square_sums")}
        for array in record.values():
            if array.ndim != 2 or len(array) != num_rows:
                raise ValueError(f"an array of shape {array.shape}, expected {num_rows} rows")
        return record
    except Exception as error:  # zipfile and NumPy raise a dozen kinds on damaged input
        path.unlink(missing_ok=True)  # so that the next start decodes this part again
        raise UserError(f"augment.cache_dir: {path} is damaged ({error}); start again to build it anew") from error


def write_whole(path: epath.Path, content: bytes) -> None:
    """Write a file atomically: it appears whole or not at all."""
    with util.replacing(path) as temporary:
        temporary.write_bytes(content)


@dataclasses.dataclass(frozen=True)
class TrainSums:
    """Exact sums over training rows; the sums of several hosts add up to those of all rows."""

    pixels: int  # result of `row_digests_sum`
    sums: list[int]  # sums of the pixels, by channel
    square_sums: list[int]

    @classmethod
    def total(cls, parts: list["TrainSums"]) -> "TrainSums":
        """Return the sums over the rows of all parts."""
        return cls(
            sum(part.pixels for part in parts) % 2**256,
            [sum(of_channel) for of_channel in zip(*(part.sums for part in parts), strict=True)],
            [sum(of_channel) for of_channel in zip(*(part.square_sums for part in parts), strict=True)],
        )


def read_sums(plan: CachePlan) -> TrainSums:
    """Return the sums over the training rows that no other host counts, from the part records."""
    layout, rows = plan_layout(plan), plan.stored_rows["train"]
    is_counted = np.isin(rows, rows if plan.own_rows is None else plan.own_rows)
    zeros = [0] * layout.image_shape[-1]
    parts = [TrainSums(0, zeros, zeros)]
    for number in range(layout.num_files("train")):
        of_file = layout.rows_of_file("train", number)
        record = read_record(plan, FileTask("train", number), len(of_file))
        counted = is_counted[of_file.start : of_file.stop]
        parts.append(
            TrainSums(
                row_digests_sum("train", rows[of_file.start : of_file.stop][counted], record["digests"][counted]),
                record["sums"][counted].sum(axis=0, dtype=np.uint64).tolist(),
                record["square_sums"][counted].sum(axis=0, dtype=np.uint64).tolist(),
            )
        )
    return TrainSums.total(parts)


def row_digests_sum(split: str, rows: np.ndarray, digests: np.ndarray) -> int:
    """Return the sum of the rows' SHA-256 mod 2**256, a fingerprint of their pixels in any order and any files."""
    seals = (
        hashlib.sha256(f"{split} {row} ".encode() + digest.tobytes()).digest()
        for row, digest in zip(rows.tolist(), digests, strict=True)
    )
    return sum(int.from_bytes(seal) for seal in seals) % 2**256


def finish_cache(plan: CachePlan, own_sums: TrainSums | None = None, all_sums: TrainSums | None = None) -> None:
    """Assemble the written parts and give the cache its name.

    Args:
      own_sums: the result of `read_sums`, if it was read before.
      all_sums: sums over all training rows; None where all of them are on this host.
    Raises:
      UserError: a failing disk.
    """
    if plan.folder.exists():  # another process was first, with the same content
        return
    build = plan.build_folder
    layout = plan_layout(plan)
    try:
        own_sums = own_sums or read_sums(plan)
        manifest = _write_small_arrays(plan, layout, all_sums or own_sums)
        if plan.own_rows is not None:
            manifest["part"] = {"rows": layout.counts["train"], "sums": dataclasses.asdict(own_sums)}
        manifest["manifest_sha256"] = seal_of(manifest)
        write_whole(build / MANIFEST, json.dumps(manifest, indent=1).encode())
        build.rename(plan.folder)
        util.remove(plan.folder / PARTS)
        for path in plan.folder.glob(".*"):  # files of killed processes, or of slower ones that build the same
            util.remove(path)
    except OSError as error:
        if not plan.folder.exists():
            raise UserError(
                f"augment.cache_dir: cannot write {plan.folder} ({error.strerror or error}); its images "
                f"files are kept in {build}: start again to go on"
            ) from error
        with contextlib.suppress(OSError):  # another process was first, with the same content
            util.remove(build)
    log.info("cached in %s", plan.folder)


def _write_small_arrays(plan: CachePlan, layout: RowLayout, train_sums: TrainSums) -> dict:
    """Write labels, ids and digests of every split; return the manifest."""
    source, arrays, digests_of_split = plan.source, {}, {}
    pixels = {"train": train_sums.pixels}
    ids = np.array(source.ids)
    for split in SPLITS:
        digests = [
            read_record(plan, FileTask(split, number), len(layout.rows_of_file(split, number)))["digests"]
            for number in range(layout.num_files(split))
        ]
        digests = np.concatenate([np.empty((0, 32), np.uint8), *digests])
        digests_of_split[split] = digests
        if split != "train":
            pixels[split] = row_digests_sum(split, plan.stored_rows[split], digests)
        rows = plan.splits[split]
        arrays[f"{split}_labels"], arrays[f"{split}_ids"] = source.labels[rows], ids[rows]
        arrays[f"{split}_digests"] = digests
    if plan.own_rows is not None:
        arrays["train_rows"] = plan.stored_rows["train"]
    sha256 = {f"{name}.npy": _write_array(plan, name, array) for name, array in arrays.items()}
    _warn_of_equal_images(plan, digests_of_split)
    counts = {split: len(plan.splits[split]) for split in SPLITS}
    num_pixels = counts["train"] * layout.image_shape[0] * layout.image_shape[1]
    mean, std = channel_statistics(train_sums.sums, train_sums.square_sums, num_pixels)
    if source.targets.classes:
        _refuse_one_class(plan, train_sums, num_pixels)
    return {
        "cache_version": CACHE_VERSION,
        "build": uuid.uuid4().hex,  # so that no two builds have the same manifest; see `discard_cache`
        "built": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "source": source.description,
        "counts": counts,
        "class_names": source.class_names,
        "image_shape": list(layout.image_shape),
        "image_dtype": layout.dtype.name,
        "rows_per_file": layout.rows_per_file,
        "mean": mean,
        "std": std,
        "pixels": {split: f"{number:064x}" for split, number in pixels.items()},
        "sha256": sha256,
        **source.targets.record(),
    }


def _refuse_one_class(plan: CachePlan, train_sums: TrainSums, num_pixels: int) -> None:
    """Raise UserError if all training pixels are of one class: then nothing can be learned."""
    mask = -plan.source.targets.planes
    total, squares = train_sums.sums[mask], train_sums.square_sums[mask]
    if total**2 != num_pixels * squares:
        return
    util.remove(plan.build_folder)
    name = plan.source.targets.classes[total // num_pixels]
    raise UserError(
        f"dataset: all pixels of the training masks of {plan.source.description} are of class {name!r}; allowed: "
        "two classes or more"
    )


def _write_array(plan: CachePlan, name: str, array: np.ndarray) -> str:
    """Write a small array; return its SHA-256."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_whole(plan.build_folder / f"{name}.npy", buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def channel_statistics(sums: list[int], square_sums: list[int], num_pixels: int) -> tuple[list, list]:
    """Return mean and standard deviation by channel, from exact integer sums over `num_pixels` pixels.

    Python's integers do not overflow, and its division rounds once. The deviation is at least 1.
    """
    mean = [total / num_pixels for total in sums]
    variance = [squares / num_pixels - m**2 for squares, m in zip(square_sums, mean, strict=True)]
    return mean, [float(np.sqrt(max(v, 1.0))) for v in variance]


def _warn_of_equal_images(plan: CachePlan, digests: dict[str, np.ndarray]) -> None:
    """Warn of images with the same pixels; a pair in two splits makes the validation too optimistic."""
    every = np.ascontiguousarray(np.concatenate([digests[split] for split in SPLITS])).view("V32").ravel()
    examples = np.concatenate([plan.stored_examples[split] for split in SPLITS])
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
        "dataset: images with the same pixels as another one: %d, in another split: %d (%s)",
        len(first),
        in_two_splits.sum(),
        ", ".join(pairs) + (", ..." if len(shown) > 3 else ""),
    )

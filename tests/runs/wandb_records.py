"""Reads the file that Weights & Biases keeps of a run: protocol buffers in LevelDB's log format."""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2 as protocol

FILE_HEADER = b":W&B"
FILE_HEADER_BYTES, BLOCK_BYTES, CHUNK_HEADER_BYTES = 7, 32_768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # which part of a record a chunk is


def read_records(path: Path) -> list[protocol.Record]:
    """All whole records of a run-ID.wandb."""
    content = path.read_bytes()
    assert content.startswith(FILE_HEADER)
    place, parts, records = FILE_HEADER_BYTES, [], []
    while place + CHUNK_HEADER_BYTES <= len(content):
        left_in_block = BLOCK_BYTES - place % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER_BYTES:
            place += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + CHUNK_HEADER_BYTES])
        if not kind:
            break
        begin = place + CHUNK_HEADER_BYTES
        parts.append(content[begin : begin + size])
        place = begin + size
        if kind in (FULL, LAST):
            records.append(protocol.Record.FromString(b"".join(parts)))
            parts = []
    return records


def rows_of(path: Path) -> list[dict]:
    """The rows that were logged, without what Weights & Biases adds."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def run_of(path: Path) -> protocol.RunRecord:
    """The description of its run: id, project, group, config."""
    return next(record.run for record in read_records(path) if record.WhichOneof("record_type") == "run")


def exit_code_of(path: Path) -> int | None:
    """The exit code that was told at the end; None without an end."""
    codes = [record.exit.exit_code for record in read_records(path) if record.WhichOneof("record_type") == "exit"]
    return codes[-1] if codes else None

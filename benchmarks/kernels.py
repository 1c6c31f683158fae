"""Kernels by the time that they take, from a trace of jax.profiler."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

from largebatch.util import UserError

NAME_LENGTH = 120  # of a kernel; names of templates go on for thousands of letters


def read_trace(folder: str, updates: int) -> dict:
    """The kernels of a trace of so many updates.

    Args:
      folder: that `jax.profiler.trace` wrote.
    Returns:
      "ms_per_update" of all kernels of all devices, and "kernels": for each its "ms" and "launches" an update, its
      "name" and the "hlo" operation that it is launched for; longest first.
    Raises:
      UserError: the trace holds no kernel.
    """
    (path,) = Path(folder).glob("**/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = defaultdict(lambda: [0.0, 0])
    for event, own_us in own_times(kernel_events(events)):
        key = event["name"][:NAME_LENGTH], event.get("args", {}).get("hlo_op", "")
        found[key][0] += own_us
        found[key][1] += 1
    if not found:
        raise UserError("profile: the trace holds no kernel")
    rows = [
        {"ms": us / 1e3 / updates, "launches": launches / updates, "name": name, "hlo": hlo}
        for (name, hlo), (us, launches) in found.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    return {"updates": updates, "ms_per_update": sum(row["ms"] for row in rows), "kernels": rows}


def kernel_events(events: list[dict]) -> list[dict]:
    """Return the events of a card's streams or of a TPU's or CPU's operations."""
    names = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            names[event["name"], event["pid"], event.get("tid")] = event["args"]["name"]

    def is_on_device(event):
        process = names.get(("process_name", event["pid"], None), "")
        line = names.get(("thread_name", event["pid"], event["tid"]), "")
        return process.startswith("/device:") and (line.startswith("Stream") or line == "XLA Ops")

    timed = [event for event in events if event.get("ph") == "X"]
    on_device = [event for event in timed if is_on_device(event)]
    return on_device or [event for event in timed if "hlo_op" in event.get("args", {})]


def own_times(events: list[dict]) -> list[tuple[dict, float]]:
    """Each event with its microseconds less those of the events within it, as of the turns of a loop."""
    own = {}
    lines = defaultdict(list)
    for event in events:
        lines[event["pid"], event["tid"]].append(event)
    for line in lines.values():
        around = []
        for event in sorted(line, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if around:
                own[id(around[-1])] -= event["dur"]
            own[id(event)] = event["dur"]
            around.append(event)
    return [(event, max(0.0, own[id(event)])) for event in events]

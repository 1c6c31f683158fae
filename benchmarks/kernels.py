"""Kernels by the time that they take, from a trace of jax.profiler."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

NAME_LENGTH, KEPT = 120, 40  # names of templates go on for thousands of letters


def read_trace(folder: str, steps: int) -> dict:
    """Read the kernels of so many steps from a folder that `jax.profiler.trace` wrote.

    Returns:
      "ms_per_step" of all kernels of all devices, and "kernels", the longest first: for each its "ms" and
      "launches" per step, its "name" and the operation of "hlo" that it is launched for.
    """
    (path,) = Path(folder).glob("**/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = defaultdict(list)
    for event, own_us in own_times(kernel_events(events)):
        found[event["name"][:NAME_LENGTH], event.get("args", {}).get("hlo_op", "")].append(own_us)
    rows = [
        {"ms": sum(times) / 1e3 / steps, "launches": len(times) / steps, "name": name, "hlo": hlo}
        for (name, hlo), times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    return {"ms_per_step": sum(row["ms"] for row in rows), "kernels": rows[:KEPT]}


def kernel_events(events: list[dict]) -> list[dict]:
    """Return the events of a card's streams, or of a TPU's or CPU's operations."""
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    timed, on_device = [event for event in events if event.get("ph") == "X"], []
    for event in timed:
        process = names.get(("process_name", event["pid"], None), "")
        line = names.get(("thread_name", event["pid"], event["tid"]), "")
        if process.startswith("/device:") and (line.startswith("Stream") or line == "XLA Ops"):
            on_device.append(event)
    return on_device or [event for event in timed if "hlo_op" in event.get("args", {})]


def own_times(events: list[dict]) -> list[tuple[dict, float]]:
    """Return each event with its microseconds, less those of events within it, such as the turns of a loop."""
    own, around = {}, defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        open_ = around[event["pid"], event["tid"]]
        while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
            open_.pop()
        if open_:
            own[id(open_[-1])] -= event["dur"]
        own[id(event)] = event["dur"]
        open_.append(event)
    return [(event, max(0.0, own[id(event)])) for event in events]

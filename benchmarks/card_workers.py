"""The processes that `bench.py card` measures in."""

import importlib.util
import json
import os

from benchmarks.timing import Child, Contender

OURS, TORCH = "benchmarks.card_child", "benchmarks.peers.torch_step"


def is_installed(name: str) -> bool:
    """Tell whether a package can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes; XLA_FLAGS are put behind those that are there."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {changes.pop('XLA_FLAGS', '')}".strip()
    return os.environ | ({"XLA_FLAGS": flags} if flags else {}) | changes


class Workers:
    """Processes that are started when they are needed, and again when one is gone; a context manager."""

    def __init__(self):
        self._children: dict[tuple[str, str], Child] = {}
        self._kept: dict[tuple[Child, str], Contender] = {}

    def child(self, module: str, deadline: float, xla_flags: str = "") -> Child:
        """The process of a module with these flags; it is killed if it has not answered by the deadline."""
        key = module, xla_flags
        child = self._children.get(key)
        if child is None or not child.is_running:
            self.stop(module, xla_flags)
            child = self._children[key] = Child(module, environment(XLA_FLAGS=xla_flags))
        child.deadline = deadline
        return child

    def stop(self, module: str, xla_flags: str = "") -> None:
        """Ends the process of a module, if there is one, so that its memory is free."""
        child = self._children.pop((module, xla_flags), None)
        if child is not None:
            self._kept = {key: contender for key, contender in self._kept.items() if key[0] is not child}
            child.__exit__()

    def machine(self, deadline: float) -> dict:
        """Return what describes the devices."""
        child = self.child(OURS, deadline)
        child.ask(build={"kind": "machine"}, name="machine")
        return child.ask(facts=True, name="machine")

    def step(self, options: dict, deadline: float, *, xla_flags: str = "", keep: bool = False) -> Contender:
        """Our step with these options.

        Args:
          keep: it stays for later rows; else the next one that does not stay takes its memory.
        """
        child, text = self.child(OURS, deadline, xla_flags), json.dumps(options)
        name = text if keep else "variant"
        if (child, name) in self._kept:
            return self._kept[child, name]
        child.ask(build={"kind": "step", **options}, name=name)
        contender = child.contender_of(text, name, options["batch_size"])
        if keep:
            self._kept[child, name] = contender
        return contender

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for module, xla_flags in list(self._children):
            self.stop(module, xla_flags)

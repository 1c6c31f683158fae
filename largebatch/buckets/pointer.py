"""Pointer: the object in a bucket that names the whole checkpoints of a run; see `bucket`."""

import dataclasses
import json
import re
import secrets

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Content of pointer.json.

    Attributes:
      id: id of the copy that wrote it; None where there is none yet.
      checkpoints: {name of the folder: SHA-256 of its SHA256SUMS}.
    """

    id: str | None = None
    checkpoints: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def new(cls, checkpoints: dict[str, str]) -> "Pointer":
        """Create a pointer with an id of its own."""
        return cls(secrets.token_hex(8), checkpoints)

    @classmethod
    def parse(cls, content: bytes) -> "Pointer":
        """Parse a file, which may come from someone else; raise ValueError if it is no pointer."""
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(found, dict) or not isinstance(found.get("id"), str):
            raise ValueError("there is no id in it")
        checkpoints = found.get("checkpoints")
        if not isinstance(checkpoints, dict):
            raise ValueError("there are no checkpoints in it")
        for name, digest in checkpoints.items():
            if not re.fullmatch("[0-9]+", name) or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise ValueError(f"{name!r} in it is no checkpoint with its SHA-256")
        return cls(found["id"], checkpoints)

    def content(self) -> bytes:
        """Return the bytes of pointer.json."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

"""A `gcloud` for the tests: writes its calls down, tells the states of a TPU as they are listed, and runs what is
started by ssh on workers that are folders of this machine.

FAKE_CLOUD is a folder with:
  calls.jsonl   the arguments of each call, in order
  states        a state for each time that it is asked, one a line; the last one stays
  account       who is logged in; nobody where it is missing
  worker-N/     the home folders of the workers
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])


def main(arguments: list[str]) -> int:
    with (CLOUD / "calls.jsonl").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    if arguments[:2] == ["auth", "list"]:
        print((CLOUD / "account").read_text() if (CLOUD / "account").exists() else "")
        return 0
    command = " ".join(arguments[2:4])
    if command == "queued-resources describe":
        return describe()
    if command == "tpu-vm ssh":
        return on_workers(arguments, lambda home: ssh(home, flag(arguments, "command")))
    if command == "tpu-vm scp":
        target = arguments[5].partition(":")[2]
        return on_workers(arguments, lambda home: bool(shutil.copy(arguments[4], home / target)) - 1)
    if (CLOUD / "refuses").exists():
        print(f"ERROR: (gcloud.{'.'.join(arguments[:4])}) PERMISSION_DENIED: no quota\nand more", file=sys.stderr)
        return 1
    return 0


def describe() -> int:
    states = (CLOUD / "states").read_text().split()
    if len(states) > 1:
        (CLOUD / "states").write_text("\n".join(states[1:]))
    if states[0] == "NONE":
        print("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: no such thing", file=sys.stderr)
        return 1
    print(states[0])
    return 0


def on_workers(arguments: list[str], action) -> int:
    homes = sorted(CLOUD.glob("worker-*"))
    if flag(arguments, "worker") != "all":
        homes = [CLOUD / f"worker-{flag(arguments, 'worker')}"]
    return max(action(home) for home in homes)


def ssh(home: Path, command: str) -> int:
    environment = os.environ | {"HOME": str(home), "PATH": f"{CLOUD / 'bin-of-workers'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", command], cwd=home, env=environment, stdin=subprocess.DEVNULL).returncode


def flag(arguments: list[str], name: str) -> str:
    return next(word.split("=", 1)[1] for word in arguments if word.startswith(f"--{name}="))


sys.exit(main(sys.argv[1:]))

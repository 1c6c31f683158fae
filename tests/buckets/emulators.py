"""Buckets for tests: emulated S3 and Google Cloud Storage, in processes of their own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec

from largebatch.pod import free_port

BIN = Path(sys.executable).parent
LIMIT_SEC = 60


@contextlib.contextmanager
def s3() -> Iterator[dict[str, str]]:
    """An empty S3 with the bucket "bucket"; the environment in which s3:// is that."""
    port = free_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    with running([BIN / "moto_server", "-p", str(port)], "s3", environment):
        yield environment


@contextlib.contextmanager
def gcs() -> Iterator[dict[str, str]]:
    """An empty Google Cloud Storage with the bucket "bucket"; the environment in which gs:// is that."""
    port = free_port()
    environment = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks for credentials
        "FSSPEC_GS": json.dumps({"token": "anon", "batch_size": 1}),  # the emulator serves one connection
    }
    command = [BIN / "gcp-storage-emulator", "start", "--in-memory", "--port", str(port)]
    with running(command, "gs", environment):
        yield environment


@contextlib.contextmanager
def running(command: list, protocol: str, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT_SEC
        make = f"import fsspec; fsspec.filesystem({protocol!r}).mkdir('bucket')"
        while subprocess.run(
            [sys.executable, "-c", make], env=os.environ | environment, capture_output=True
        ).returncode:
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            assert process.poll() is None, f"{command[0]} ended"
        yield
    finally:
        process.terminate()
        process.wait()


def s3_files(environment: dict[str, str]) -> fsspec.AbstractFileSystem:
    """The files of the emulated S3 for this process."""
    return fsspec.filesystem(
        "s3",
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        use_listings_cache=False,
    )

"""Downloads the EuroSAT images."""

import hashlib
import http.client
import urllib.request

from etils import epath

from largebatch.errors import UserError
from largebatch.files import remove_stale, replacing

# The 27,000 RGB JPEGs of Helber et al. 2019, tried in this order. The first is the authors' record, the
# second torchvision's pinned copy of the original archive, whose SHA-256 is also the one TFDS checks.
EUROSAT_MIRRORS = (
    (
        "https://zenodo.org/records/7711810/files/EuroSAT_RGB.zip",
        "b4f5b234ecb7d7ff9c6cddb046543b4717c53fd6e9815be6c0e80cc614f51b90",
    ),
    (
        "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
        "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
    ),
)


def eurosat_path(cache_dir: epath.Path) -> epath.Path:
    """Return where the zip is kept once it was downloaded."""
    return cache_dir / "EuroSAT.zip"


def download_eurosat(cache_dir: epath.Path) -> epath.Path:
    """Path of the official zip in `cache_dir`, downloaded, checked against its SHA-256 and kept."""
    target = eurosat_path(cache_dir)
    if target.exists():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        with replacing(target) as part:
            part.touch()
            _download_from_a_mirror(part)
    except OSError as error:
        raise UserError(f"augment.cache_dir: cannot write {target} ({error.strerror or error})") from error
    return target


def _download_from_a_mirror(part: epath.Path) -> None:
    """Raises UserError if none has the file with its SHA-256."""
    problems = []
    for url, sha256 in EUROSAT_MIRRORS:
        try:
            sha256_of_file = _download(url, part)
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            problems.append(f"{url} cannot be fetched ({getattr(error, 'reason', error)})")
            continue
        if sha256_of_file == sha256:
            return
        problems.append(f"{url} has SHA-256 {sha256_of_file}, expected {sha256}")
    raise UserError(
        f"dataset.path: not given, and EuroSAT could not be downloaded: {'; '.join(problems)}. "
        "Give the path of EuroSAT.zip or of its unpacked folder"
    )


def _download(url: str, target: epath.Path) -> str:
    """Downloads with a progress bar; returns the SHA-256 of what came."""
    from rich import progress

    digest = hashlib.sha256()
    columns = (
        progress.TextColumn("downloading {task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
    )
    with (
        urllib.request.urlopen(url, timeout=30) as response,
        target.open("wb") as file,
        progress.Progress(*columns) as bar,
    ):
        task = bar.add_task(url, total=int(response.headers.get("Content-Length", 0)) or None)
        while block := response.read(1 << 20):
            file.write(block)
            digest.update(block)
            bar.advance(task, len(block))
    return digest.hexdigest()

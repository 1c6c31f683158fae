"""bench.py input, stream: images from files to the devices, and training that reads them as it goes."""

import concurrent.futures
import multiprocessing
import resource
import tempfile

import jax

import augment
import model
from benchmarks import timing
from benchmarks.ours import OurStep
from configs import eurosat
from largebatch.config import rules
from largebatch.config.fields import Config
from largebatch.data import placement
from largebatch.data.batching import choose_sharding
from largebatch.data.cache import Cache, DatasetInfo
from largebatch.hardware.chips import Hardware
from largebatch.hosts.clock import Clock
from largebatch.hosts.start import start_jax
from largebatch.runs.summary import git_commit, versions
from largebatch.training.views import expansion
from plan import plan_run

PASSES = ("cold", "warm")  # by whether the cache is there
STORAGES = ("streamed", "on_device")


def make_config(path: str, cache_dir: str, **sections: dict) -> Config:
    """Return the config of EuroSAT with other images and another cache, and other fields by section."""
    config = rules.check(eurosat.get_config().to_dict(), model.MODELS)
    return config.replace(dataset={"path": path}, augment={"cache_dir": cache_dir}).replace(**sections)


def bench_input(path: str) -> dict:
    """Decode, cache, expand and place the zip or folder `path`: twice, the second time from the cache of the first.

    Each time is in a process of its own, so that no page or buffer of the first helps or hinders the second.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache_dir:
        results = []
        for _ in PASSES:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                results.append(pool.submit(build_and_place, path, cache_dir).result())
    seconds = {name: result.pop("seconds") for name, result in zip(PASSES, results, strict=True)}
    return {"command": "input", "seconds": seconds, **results[-1], "versions": versions(), "commit": git_commit()}


def build_and_place(path: str, cache_dir: str) -> dict:
    """Build a cache if it is not there, read, verify, expand and place it; return seconds, and bytes of images."""
    start_jax()
    clock, config = Clock(), make_config(path, cache_dir, augment={"storage": "expanded"})
    with clock.measure("cache"):
        cache = augment.prepare_cache(config)
    views = augment.VIEW_COUNTS[config.augment.views]
    sharding = choose_sharding(None, cache.layout.counts["train"], jax.device_count(), views)
    with clock.measure("place"):
        data = placement.place(cache, sharding, config.dataset.split_seed, expansion(config.augment.storage, views))
        jax.block_until_ready(data.train.arrays)
    return {
        "seconds": dict(clock.seconds),
        "images": cache.layout.num_rows,
        "image_bytes": cache.layout.row_bytes,
        "bytes_on_devices": data.train.arrays["images"].nbytes,
        "expected_bytes": cache.layout.counts["train"] * views * cache.layout.row_bytes,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def print_input(result: dict) -> None:
    """Print the result of `bench_input`, a line each."""
    for name, seconds in result["seconds"].items():
        print(f"{name}: cache {seconds['cache']:.2f} s, read, verify and place {seconds['place']:.2f} s")
    rate = result["images"] / result["seconds"][PASSES[0]]["cache"]
    print(f"{result['images']:,} images, {rate:,.0f} a second into the cache")
    for name in ("bytes_on_devices", "expected_bytes", "peak_resident_bytes"):
        print(f"{name.replace('_', ' ')}: {result[name] / 1e9:.4f} GB")


# ---- streamed beside resident ------------------------------------------------------------------------


def build(options: dict) -> OurStep:
    """Build our step on a cache, whose images are "streamed" or stay "on_device" by options["storage"].

    A stream has the smallest buffer, so that every step reads.
    """
    start_jax()
    changes = {"augment": {"storage": options["storage"]}, "batch": {"size": options["batch_size"]}}
    config = make_config(options["path"], options["cache_dir"], model={"dtype": "float32"}, **changes)

    def step_on(cache: Cache) -> OurStep:
        plan, rows = plan_run(config, DatasetInfo.of(cache), Hardware.here()), None
        if plan.storage == "streamed":
            rows = plan.sharding.share_bounds(plan.schedule.max_batch_size)[1]
        data = placement.place(cache, plan.sharding, config.dataset.split_seed, buffer_rows=rows)
        return OurStep(plan, data.train)

    return augment.with_cache(config, step_on)


def bench_stream(path: str, cache_dir: str, batch_size: int, repeats: int) -> dict:
    """Time steps on images that are read as they are needed, beside steps on images that stay on the devices."""
    options = {"path": path, "cache_dir": cache_dir, "batch_size": batch_size}
    with timing.Child("benchmarks.inputs") as child:
        steps = [child.build(storage, {**options, "storage": storage}) for storage in STORAGES]
        timing.interleave(steps, repeats)
        facts = steps[0].ask(ask="facts")
    rates = {step.name: step.figures()["images_per_sec"] for step in steps}
    return {
        "command": "stream",
        **options,
        "images_per_sec": rates,
        "ratio": steps[0].ratio(steps[1]),
        "ours": facts,
    }


def print_stream(result: dict) -> None:
    """Print the result of `bench_stream` in a line."""
    streamed, resident = (result["images_per_sec"][storage]["median"] for storage in STORAGES)
    ratio = "{median:.3f}x ({min:.3f}-{max:.3f})".format(**result["ratio"])
    rates = f"streamed {streamed:,.0f} images/s, on the devices {resident:,.0f}"
    print(f"batch {result['batch_size']:,}   {rates}: {ratio}")

"""bench.py micro_batches: cycles per image by micro-batch size, for the table of largebatch/hardware/.

A full batch of EuroSAT's size is compiled for each network; ResNet-50 takes ImageNet's images and group
normalisation, for with batch normalisation the micro-batch is part of what is computed.
"""

import jax

import examine
import model
from benchmarks.compile import Case
from largebatch.config import rules
from largebatch.hardware.chips import TPUS
from largebatch.hardware.targets import find_target
from largebatch.util import UserError

TARGETS = ("v3:4x4", "v5e:4x8", "v6e:4x4")
NETWORKS = ("convnet", "resconvnet", "resconvnet7", "resnet8", "resnet50")
# Parts of a device's share of 5,400, and of 1,024 for ResNet-50.
PARTS = (1, 2, 4, 8, 16, 32, 64)
MOST_MEMORY = 0.6  # of a device: a larger set, or another optimizer, has to fit too


def bench_micro_batches(networks: str | None, targets: str | None) -> dict:
    """Compiles the update of every network with every size.

    Args:
      networks, targets: names with commas between; None for all.
    """
    rows = []
    for name in targets.split(",") if targets else TARGETS:
        target = find_target(name)
        if target.hardware.device_kind not in TPUS:
            raise UserError(f"--targets: {name!r}; allowed: TPUs, since other compilers tell no time")
        for network in networks.split(",") if networks else NETWORKS:
            for parts in PARTS:
                rows.append(measure(network, target, parts))
                print(row_text(rows[-1]), flush=True)
                jax.clear_caches()
    return {"rows": rows, "best": best(rows)}


def measure(network: str, target, parts: int) -> dict:
    """Cycles per image with a device's share in so many parts."""
    if network == "resnet50":
        case, share = Case("imagenet_resnet50", (("model.norm", "group"), ("batch.ghost_size", None))), 1024
        batch_size = share * target.hardware.num_devices
    else:
        case, share, batch_size = Case("eurosat_seed"), 172_800 // target.hardware.num_devices, "full"
    config = case.load()
    config.model.name, config.model.dtype, config.batch.size = network, "bfloat16", batch_size
    config.batch.micro_batch_size = -(-share // parts)
    row = {"target": target.name, "device_kind": target.hardware.device_kind, "network": network}
    row["micro_batch_size"] = config.batch.micro_batch_size
    try:
        update = examine.compile_for(rules.check(config.to_dict(), model.MODELS), target).programs["update"]
    except UserError as error:  # it does not fit
        return row | {"error": str(error)}
    return row | {
        "cycles_per_image": update.cycles / share,
        "temporaries": update.memory["temporaries"],
        "share_of_memory": sum(update.memory.values()) / target.chip.memory_bytes,
    }


def best(rows: list[dict]) -> dict[str, int]:
    """The size with the fewest cycles of those that leave room, by "kind, network"."""
    found: dict[str, dict] = {}
    for row in rows:
        if "error" in row or row["share_of_memory"] > MOST_MEMORY:
            continue
        key = f"{row['device_kind']}, {row['network']}"
        if key not in found or row["cycles_per_image"] < found[key]["cycles_per_image"]:
            found[key] = row
    return {key: row["micro_batch_size"] for key, row in found.items()}


def row_text(row: dict) -> str:
    """A row as a line."""
    start = f"{row['target']:8} {row['network']:12} {row['micro_batch_size']:6,}"
    if "error" in row:
        return f"{start}  {row['error'][:100]}"
    temporaries = row["temporaries"] / 1e6
    return f"{start}  {row['cycles_per_image']:10,.0f} cycles an image, {temporaries:8,.0f} MB of temporaries"


def print_micro_batches(result: dict) -> None:
    """Prints the best sizes."""
    for key, size in result["best"].items():
        print(f"{key}: {size:,}")

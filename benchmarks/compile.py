"""bench.py compile: every config's programs, compiled for devices that are not here; the table of docs/hardware.md.

Rows are kept in docs/hardware.json. A row that is compiled again replaces the one before, so the table can be
brought up to date piece by piece: --configs and --targets choose.
"""

import dataclasses
import importlib.util
import time
from pathlib import Path

import jax

import examine
import model
from benchmarks import pages
from largebatch.cli import ROOT
from largebatch.config import rules
from largebatch.hardware.targets import find_target
from largebatch.runs.summary import git_commit, versions
from largebatch.training.costs import flops_utilisation
from largebatch.util import UserError

ROWS, PAGE = ROOT / "docs" / "hardware.json", ROOT / "docs" / "hardware.md"
OWN = "own_images"  # the config of data whose size nobody knows
TARGETS = ("v3:4x4", "v5e:4x8", "v6e:4x4", "h200")
HEADER = (
    "config",
    "devices",
    "batch",
    "micro-batch",
    "memory a device",
    "all-reduce",
    "M cycles an update",
    "images/s, estimated",
    "largest cost",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A config file, with fields that differ from it."""

    config: str
    fields: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """As the table calls it."""
        return " ".join([self.config, *(f"{field}={value}" for field, value in self.fields)])

    def load(self):
        """The config."""
        path = ROOT / "configs" / f"{self.config}.py"
        if not path.exists():
            raise UserError(f"--configs: {self.config!r}; allowed: names of files in configs/, without .py")
        spec = importlib.util.spec_from_file_location(self.config, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config()
        config.update_from_flattened_dict(dict(self.fields))
        return config


def all_cases(target: str) -> list[Case]:
    """Return every config whose data are known, and ImageNet with four times the batch.

    ImageNet is streamed to a single card, which cannot hold it.
    """
    large = "imagenet_resnet50"
    fields = (("augment.storage", "streamed"),) if target == "h200" else ()
    names = [path.stem for path in sorted((ROOT / "configs").glob("*.py")) if path.stem != OWN]
    cases = [Case(name, fields if name == large else ()) for name in names]
    return [*cases, Case(large, (("batch.size", 32_768), *fields))]


def bench_compile(configs: str | None, targets: str | None) -> dict:
    """Compiles, and brings rows and page up to date.

    Args:
      configs, targets: names with commas between; None for all.
    """
    for name in targets.split(",") if targets else TARGETS:
        target = find_target(name)
        for case in chosen_cases(configs, name):
            row = compile_case(case, target)
            write_rows(read_rows() | {f"{case.name} {name}": row})  # read again: another process may have written
            jax.clear_caches()
    return {"rows": list(read_rows().values())}


def chosen_cases(configs: str | None, target: str) -> list[Case]:
    """The cases of these configs."""
    cases = all_cases(target)
    if configs is None:
        return cases
    names = configs.split(",")
    known = {case.config for case in cases}
    return [case for case in cases if case.config in names] + [Case(name) for name in names if name not in known]


def compile_case(case: Case, target) -> dict:
    """A row: what `examine.compile_for` finds, or why it does not fit."""
    row = {
        "config": case.name,
        "target": target.name,
        "device_kind": target.hardware.device_kind,
        "devices": target.hardware.num_devices,
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "versions": versions(),
    }
    config = case.load()
    try:
        compiled = examine.compile_for(rules.check(config.to_dict(), model.MODELS), target)
    except UserError as error:
        return row | {"error": str(error)}
    plan, update = compiled.plan, next(iter(compiled.programs.values()))
    batch_size = plan.schedule.max_batch_size
    row |= {
        "batch_size": batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "storage": plan.storage,
        "dtype": str(plan.network.dtype),
        "num_updates": plan.schedule.num_updates,
        "memory": update.memory,
        "needed": compiled.needed,
        "collectives": [one._asdict() for one in update.collectives],
        "unknown_loops": update.unknown_loops,
        "moved_bytes": update.moved_bytes,
        "num_operations": update.num_operations,
        "cycles": update.cycles,
        "costs": [cost._asdict() for cost in update.costs[:8]],
        "seconds_to_compile": compiled.seconds,
        "flops_per_image": compiled.flops_per_image,
    }
    validation = compiled.programs["validation"].cycles
    if update.cycles:
        seconds = update.cycles / target.chip.clock_hz
        row["images_per_sec"] = batch_size / seconds
        row["seconds_of_all_updates"] = seconds * plan.schedule.num_updates
        row["peak_share"] = flops_utilisation(compiled.flops_per_image, row["images_per_sec"], target.hardware)
        row["validation_share"] = validation / (validation + update.cycles * plan.config.train.inner_steps)
    return row


# ---- rows and page --------------------------------------------------------------------------------------


def read_rows() -> dict[str, dict]:
    """The rows that are kept, by config and target."""
    return {f"{row['config']} {row['target']}": row for row in pages.read_rows(ROWS)}


def write_rows(rows: dict[str, dict]) -> None:
    """Keeps the rows, and puts their table into the page."""
    ordered = [rows[key] for key in sorted(rows)]
    pages.write_rows(ROWS, ordered)
    pages.write_part(PAGE, "compiled", table(ordered))


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    return pages.markdown_table(HEADER, map(cells, rows))


def cells(row: dict) -> list[str]:
    """A row's cells."""
    devices = f"`{row['target']}`, {row['devices']}"
    if "error" in row:
        return [f"`{row['config']}`", devices, row["error"], *[""] * 6]
    memory, cost = row["memory"], row["costs"][0] if row["costs"] else None
    allreduce = sum(one["bytes"] * one["times"] for one in row["collectives"])
    kernels = f"{row['num_operations']:,.0f} kernels and calls"
    return [
        f"`{row['config']}`",
        devices,
        f"{row['batch_size']:,}",
        f"{row['micro_batch_size']:,}, {row['dtype']}",
        f"{sum(memory.values()) / 1e6:,.0f} MB",
        f"{allreduce / 1e6:.2f} MB" if allreduce else "none",
        f"{row['cycles'] / 1e6:,.2f}" if row["cycles"] else kernels,
        f"{row['images_per_sec']:,.0f}" if row["cycles"] else "not estimated",
        f"{cost['share']:.0%} {cost['operation'] or 'copies'}" if cost else "",
    ]


def print_compile(result: dict) -> None:
    """Prints the table."""
    print(table(result["rows"]))
    print(f"rows in {Path(ROWS).relative_to(ROOT)}, table in {Path(PAGE).relative_to(ROOT)}")

"""Checks of a config before a long run: on this machine, and on devices that need not be attached.

python train.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip --doctor
python train.py --config configs/eurosat_v3_32.py --compile_for v3:4x4
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from ml_collections import config_dict

import augment
import model as models
from build import Prepared, ProgramCache, make_step, prepare, programs_of
from largebatch import cli, doctor
from largebatch.config import rules
from largebatch.config.fields import Config
from largebatch.data.batching import DataSharding, Grouping
from largebatch.data.cache import DatasetInfo
from largebatch.data.cache_build import CachePlan
from largebatch.data.placement import train_shapes
from largebatch.data.sharded_split import block_shapes
from largebatch.data.sources.find import SIZES, published_info
from largebatch.hardware.chips import AUTO, Hardware, auto_dtype
from largebatch.hardware.compiled import CompiledProgram, compile_and_look
from largebatch.hardware.targets import Target, find_target
from largebatch.hosts import collectives
from largebatch.hosts.clock import Clock
from largebatch.optim.schedule_text import format_range
from largebatch.optim.schedules import Schedule
from largebatch.terminal import print_table
from largebatch.training.costs import training_costs
from largebatch.training.local_sgd import Sync
from largebatch.training.step import make_inner_loop
from largebatch.util import UserError
from plan import RunPlan, choose_plan, needed_bytes, plan_run, state_shapes

MOST_ROWS = 24
COLUMNS = ["step", "batch", "micro-batches a device", "learning rate", "examples before", "epoch"]


def run(config: config_dict.ConfigDict, *, here: bool, target_name: str | None) -> int:
    """Examine a config and print the findings; return the exit code.

    Args:
      here: whether to examine the config on this machine.
      target_name: name of the devices to compile for, see `hardware.targets`.
    Raises:
      UserError: something would fail.
    """
    target = find_target(target_name) if target_name else None  # a wrong name is refused at once
    if target:
        config.devices.platform = "cpu"  # as `find_target` has set
    config_here, _ = cli.start(config, models.MODELS)
    if here:
        examine_here(config_here)
    if target:
        compiled = compile_for(rules.check(config.to_dict(), models.MODELS), target)
        devices = f"{target.hardware.num_devices} x {target.hardware.device_kind}"
        ending = f"compiled for {target.name}, {devices}, in {compiled.seconds:.0f} s; nothing was run"
        doctor.show(doctor.check_programs(compiled), ending)
    return 0


def show_batches(config: config_dict.ConfigDict) -> int:
    """Print the batches of a run on these devices; return the exit code.

    Raises:
      BadSetting: the config does not go with the data set or the devices.
    """
    config, _ = cli.start(config, models.MODELS)
    plan = plan_run(config, dataset_info(config), Hardware.here())
    if collectives.is_primary():
        print_batches(plan.schedule, plan.sharding, plan.grouping)
    return 0


def config_to_examine(config: Config) -> Config:
    """Return a copy of a config with a gradient at the start, and with steps that all devices share."""
    # With a head of zeros the first gradient of all other layers would be zero.
    return config.replace(model={"zero_head": False}, sync={"mode": "every_step", "start_step": 0})


def print_batches(schedule: Schedule, sharding: DataSharding, grouping: Grouping) -> None:
    """Print the steps at which the batch size changes, at most MOST_ROWS evenly spread ones."""
    stages, num_steps = schedule.batch_sizes.first(schedule.num_steps), schedule.num_steps
    examples = schedule.examples_before(num_steps)
    print(
        f"{num_steps:,} steps, batch {format_range(stages.values)}, {examples:,} examples, "
        f"{examples / schedule.examples_per_epoch:,.2f} epochs on {sharding.num_devices:,} devices"
    )
    places, rows = np.linspace(0, len(stages.starts) - 1, min(len(stages.starts), MOST_ROWS)).astype(int), []
    for step in stages.starts[places].tolist():
        batch_size, before = schedule.batch_size_at(step), schedule.examples_before(step)
        counts = {int(grouping.num_micro_batches(share)) for share in sharding.share_bounds(batch_size)}
        rate, epoch = f"{schedule.learning_rate_at(step):.4g}", f"{before / schedule.examples_per_epoch:.2f}"
        rows.append([f"{step}", f"{batch_size}", " or ".join(map(str, sorted(counts))), rate, f"{before}", epoch])
    print_table(COLUMNS, rows)
    if len(places) < len(stages.starts):
        print(f"{len(places)} of the {len(stages.starts):,} steps at which the batch size changes")


def examine_here(config: Config) -> None:
    """Print what a cache build takes and whether the images fit; then build the cache and try steps."""
    planned = augment.plan_cache(config)
    if planned is not None:
        doctor.show([collectives.agreed(lambda: doctor.check_build(planned))])
    plan = choose_plan(config, dataset_here(config, planned))
    doctor.show([doctor.check_memory(plan.storage, needed_bytes(plan))])
    started = time.perf_counter()
    with fits("on these devices"):
        run = prepare(config_to_examine(config), Clock(), ProgramCache())
        timings = doctor.time_micro_batches(run, loops_by_size(run), started)
        found = [
            doctor.check_first_step(run),
            doctor.check_micro_batch(run.plan, timings),
            doctor.estimate_time(run, timings[run.plan.micro_batch_size]),
        ]
    doctor.show(found, f"examined in {time.perf_counter() - started:.0f} s; nothing was written to a run folder")


def loops_by_size(run: Prepared) -> dict[int, Callable]:
    """Return the inner loop of a run by micro-batch size: its own, half and twice of it where that trains alike."""
    plan, batch = run.plan, run.plan.config.batch
    loops = {plan.micro_batch_size: run.programs.inner_loop}
    # Batches would be normalised in other parts. On a pod a host without memory would leave others in a collective.
    if jax.process_count() > 1 or (plan.config.model.norm == "batch" and batch.ghost_size is None):
        return loops
    unit = plan.grouping.group_size if batch.ghost_size else 1
    largest = -(-plan.schedule.max_batch_size // plan.num_devices)
    for size in (plan.micro_batch_size // 2, plan.micro_batch_size * 2):
        if 1 <= size <= largest and size % unit == 0:
            other = plan.config.replace(batch={"micro_batch_size": size})
            loops[size] = make_inner_loop(make_step(plan_run(other, plan.data, plan.hardware, plan.storage)))
    return loops


@contextlib.contextmanager
def fits(where: str) -> Iterator[None]:
    """Raise UserError where XLA finds that a program does not fit `where` it is to run."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        advice = "a smaller batch.micro_batch_size or another augment.storage needs less"
        raise UserError(f"does not fit {where}: {text[:300]!r}; {advice}") from error


# ---- devices that need not be attached ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A config's programs, compiled for a target."""

    target: Target
    plan: RunPlan
    programs: dict[str, CompiledProgram]
    needed: dict[str, int]  # the estimate of bytes on a device, by part
    flops_per_image: float
    seconds: float  # of compiling


def compile_for(config: Config, target: Target) -> Compiled:
    """Compile exactly the programs of `config` for `target`, without data.

    Raises:
      BadSetting: they do not fit there.
      UserError: the size of the data set is not known.
    """
    started = time.perf_counter()
    if config.model.dtype == AUTO:
        config = config.replace(model={"dtype": auto_dtype(target.hardware.platform)})
    free = target.chip.memory_bytes
    plan = choose_plan(config, dataset_info(config), target.hardware, free_bytes=free)
    lowered = lower_plan(plan, free, target.devices)
    share = plan.sharding.share_bounds(plan.schedule.max_batch_size)[1]
    lengths = {"steps": 1.0, "micro_batches": plan.grouping.num_micro_batches(share)}
    programs = {}
    for name, program in lowered.items():
        with fits(f"on {target.name}, in the {name}"):
            programs[name] = compile_and_look(program, lengths, target.hardware.platform)
    return Compiled(
        target=target,
        plan=plan,
        programs=programs,
        needed=needed_bytes(plan, free),
        flops_per_image=training_costs(plan.network, plan.image_shape).flops,
        seconds=time.perf_counter() - started,
    )


def lower_plan(plan: RunPlan, free_bytes: int, devices: list) -> dict[str, jax.stages.Lowered]:
    """Lower all programs of a plan for `devices`, which need not be attached, without data; return them by name.

    Args:
      free_bytes: free memory of a device, where validation images stay if they fit.
    """
    layout, size = plan.data.layout, plan.micro_batches.predicted_at_once
    return programs_of(plan, devices).lower(
        (
            state_shapes(plan),
            train_shapes(layout, plan.sharding, plan.stored_views, plan.buffer_rows),
            block_shapes(layout, plan.num_devices, size, free_bytes),
        ),
        plan.schedule.inputs(0, plan.inputs_length),
        Sync.from_config(plan.config.sync),
        len(devices),
    )


def dataset_info(config: Config) -> DatasetInfo:
    """Describe a config's data set: as it is published, or from the images where a path is given.

    Raises:
      UserError: the set is not known, and there are no images.
    """
    fields = config.dataset
    if fields.path is None and fields.source != "synthetic" and fields.name in SIZES:
        return published_info(fields)
    return dataset_here(config, augment.plan_cache(config))


def dataset_here(config: Config, planned: CachePlan | None) -> DatasetInfo:
    """Describe a config's data set from its cache, or from the plan of one that is not built."""
    if planned is None:
        return DatasetInfo.of(augment.prepare_cache(config))
    return DatasetInfo.unread(planned.layout, len(planned.dataset.class_names), planned.dataset.targets)

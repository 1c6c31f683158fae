"""Examines a config before a long run: on this machine, and on devices that are not here.

python train.py --config configs/eurosat.py --config.dataset.path EuroSAT.zip --doctor
python train.py --config configs/eurosat_v3_32.py --compile_for v3:4x4
"""

import dataclasses
import time

import jax
import numpy as np
from ml_collections import config_dict

import augment
import model as models
from experiment import ProgramCache, prepare
from largebatch import cli
from largebatch.cache.cache import RowLayout
from largebatch.cache.plan import make_layout
from largebatch.doctor import checks, dataset, elsewhere, findings
from largebatch.errors import UserError
from largebatch.hardware.compiled import CompiledProgram, compile_and_look
from largebatch.hardware.dtypes import auto_dtype, with_dtype
from largebatch.hardware.targets import Target, find_target
from largebatch.hosts.clock import Clock
from largebatch.sources.published_sizes import SIZES
from largebatch.tasks.planes import NO_TARGETS, PixelTargets
from largebatch.training.ahead import lower_programs
from largebatch.training.costs import training_costs
from largebatch.training.setup import DataFacts, Setup
from resolve import choose_setup, make_parts, needed_bytes, state_shapes


def run(config: config_dict.ConfigDict, *, here: bool, target_name: str | None) -> int:
    """Prints what was found; returns the exit code.

    Args:
      here: whether to examine the config on this machine.
      target_name: of devices to compile for, see `hardware.targets`.
    Raises:
      UserError: something would fail.
    """
    target = find_target(target_name) if target_name else None  # a wrong name is told at once
    if target:
        config.devices.platform = "cpu"  # as `find_target` has set
    config_here, _ = cli.start(config, models.MODELS)
    if here:
        examine_here(config_here)
    if target:
        examine_elsewhere(config, target)
    return 0


def examine_here(config: config_dict.ConfigDict) -> None:
    """Tells what a build of the cache would take and whether the images fit; then builds it and tries updates."""
    estimate = augment.estimate_cache(config)
    if estimate is not None:
        findings.show([dataset.check_build(estimate)])
        setup = choose_setup(config, facts_of(estimate.layout, estimate.num_classes, estimate.targets))
        findings.show([dataset.check_storage(setup, needed_bytes(setup, estimate.layout))])
    started = time.perf_counter()
    experiment, state = prepare(checks.config_to_examine(config), Clock(), ProgramCache())
    checks.report(experiment, state, config.sync, started)


# ---- devices that are not here ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A config's programs, compiled for a target."""

    target: Target
    setup: Setup
    programs: dict[str, CompiledProgram]
    needed: dict[str, int]  # the estimate of bytes on a device, by part
    flops_per_image: float
    seconds: float  # that compiling took


def examine_elsewhere(config: config_dict.ConfigDict, target: Target) -> None:
    """Compiles a config's programs for `target` and prints what that tells."""
    compiled = compile_for(config, target)
    found = elsewhere.check_programs(
        compiled.setup, target, compiled.programs, compiled.needed, compiled.flops_per_image
    )
    kind, count = target.hardware.device_kind, target.hardware.num_devices
    ending = f"compiled for {target.name}, {count} x {kind}, in {compiled.seconds:.0f} s; nothing was run"
    findings.show(found, ending)


def compile_for(config: config_dict.ConfigDict, target: Target) -> Compiled:
    """Compiles exactly the programs of `config` for `target`, without data.

    Raises:
      BadSetting: they do not fit there.
      UserError: the size of the data set is not known.
    """
    started = time.perf_counter()
    config = with_dtype(config, auto_dtype(target.hardware.platform))
    data, free = data_facts(config), target.chip.memory_bytes
    setup = choose_setup(config, data, target.hardware, free_bytes=free)
    parts, state = make_parts(setup.program), state_shapes(setup)
    lowered = lower_programs(parts, setup, state, data.layout, free, target.devices)
    lengths = {"updates": 1.0, "micro_batches": num_micro_batches(setup)}
    programs = {name: _compile(name, program, lengths, target) for name, program in lowered.items()}
    return Compiled(
        target=target,
        setup=setup,
        programs=programs,
        needed=needed_bytes(setup, data.layout, free),
        flops_per_image=training_costs(setup.program.network, setup.program.image_shape).flops,
        seconds=time.perf_counter() - started,
    )


def _compile(name: str, program: jax.stages.Lowered, lengths: dict[str, float], target: Target) -> CompiledProgram:
    """Compiles a program; its compiler may find that it does not fit, where the estimate said that it would."""
    try:
        return compile_and_look(program, lengths, target.hardware.platform)
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        raise UserError(
            f"does not fit on {target.name}: the compiler of the {name} says {text[:300]!r}; a smaller "
            "batch.micro_batch_size needs less, and so does another augment.storage"
        ) from error


def num_micro_batches(setup: Setup) -> int:
    """That the device with the largest share has in an update of the largest batch."""
    share = setup.program.sharding.share_bounds(setup.schedule.max_batch_size)[1]
    return setup.program.grouping.num_micro_batches(share)


def data_facts(config: config_dict.ConfigDict) -> DataFacts:
    """The size of a config's data set: as it is published, or from the images where a path is given.

    Raises:
      UserError: it is not known, and there are no images.
    """
    fields = config.dataset
    if fields.path is None and fields.name in SIZES:
        size = SIZES[fields.name]
        height, width, channels = size.image_shape
        if fields.image_size is not None:
            height, width = np.broadcast_to(fields.image_size, 2).tolist()
        shape = (height, width, fields.channels or channels)
        return facts_of(make_layout(size.counts, shape, np.dtype(size.dtype)), size.num_classes)
    estimate = augment.estimate_cache(config)
    if estimate is not None:
        return facts_of(estimate.layout, estimate.num_classes, estimate.targets)
    return DataFacts.of(augment.prepare_cache(config))


def facts_of(layout: RowLayout, num_classes: int, targets: PixelTargets = NO_TARGETS) -> DataFacts:
    """The properties of a data set whose pixels nobody has looked at."""
    channels = layout.image_shape[-1] - targets.planes
    middle = np.iinfo(layout.dtype).max / 2
    mean, std = (middle,) * channels, (middle / 2,) * channels
    return DataFacts(layout.counts["train"], layout, num_classes, mean, std, targets)

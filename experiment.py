"""From a config to what a run is made of: Setup -> data on the devices -> compiled programs.

`resolve_setup` derives everything that follows from a config, once. `ProgramCache` places the data and compiles the
programs, and keeps both for the next run of the process that can share them. `prepare` puts it together as an
`Experiment`, which training, evaluation, the doctor, sweeps and benchmarks work on.
"""

import dataclasses
import functools

import jax
import numpy as np

import augment
import model as models
from largebatch.cache.cache import Cache
from largebatch.cache.plan import FIRST_ROWS
from largebatch.data.placement import DeviceData, place
from largebatch.data.rows import split_planes
from largebatch.data.streaming import load_inputs
from largebatch.hardware.chips import Hardware
from largebatch.hosts import collectives, replicas
from largebatch.hosts.clock import Clock
from largebatch.optim.schedules import UpdateInputs
from largebatch.predictions.cases import Cases, CasesToWrite
from largebatch.predictions.files import Outcome, Predictions
from largebatch.tasks.task import Scores
from largebatch.training.costs import training_costs
from largebatch.training.evaluation import SplitPredictions, SplitRows, predict_split
from largebatch.training.loss import make_normalise
from largebatch.training.nonfinite import locate_nonfinite
from largebatch.training.programs import CompiledPrograms, compile_programs
from largebatch.training.setup import (
    DataFacts,
    ProgramOptions,
    Setup,
)
from largebatch.training.state import TrainState, count_params
from largebatch.training.views import expansion
from resolve import choose_setup, dataset_key, make_parts, possible_storages, resolve_setup

# A set of programs takes some 800 memory maps on a CPU; at Linux' limit of 65,530 a process dies.
MAX_PROGRAMS = 30
WHITENING_IMAGES = FIRST_ROWS  # training images whose patches whiten the stem


# ---- data and programs ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlacedSetup:
    """A Setup whose data are on the devices."""

    setup: Setup
    cache: Cache
    data: DeviceData


class ProgramCache:
    """Data on the devices and compiled programs, for all runs of a process that can share them."""

    def __init__(self):
        self.local_devices = jax.local_devices()
        self._asked, self._placed, self._kernels = None, None, {}
        self._programs: dict[ProgramOptions, CompiledPrograms] = {}

    def load(self, config) -> PlacedSetup:
        """Resolves the config and places its data, unless they are there.

        Of several data sets only the latest is kept, for it fills the devices.

        Raises:
          BadSetting: the config does not go with the data or the devices, or they do not fit.
          UserError: the data set is bad or missing.
        """
        if self._asked == dataset_key(config) and (placed := self._placed_for(config)):
            return placed
        self._asked, self._placed, self._kernels = None, None, {}
        for attempt in augment.cache_attempts(config, to_train=True):
            with attempt as cache:
                setup = choose_setup(config, DataFacts.of(cache))
                program = setup.program
                data = place(
                    cache,
                    program.sharding,
                    config.dataset.split_seed,
                    expansion(program.storage, program.sharding.views),
                    buffer_rows=program.buffer_rows,
                )
        jax.block_until_ready((data.train.arrays, data.validation.resident))
        self._asked, self._placed = dataset_key(config), PlacedSetup(setup, cache, data)
        return self._placed

    def _placed_for(self, config) -> PlacedSetup | None:
        """What is placed, with the Setup of another config; None where it does not serve that."""
        was = self._placed.setup.program
        data, hardware = DataFacts.of(self._placed.cache), Hardware.here(was.sharding.num_devices)
        if was.storage not in possible_storages(config):
            return None
        setup = resolve_setup(config, data, hardware, was.storage)
        if not setup.program.is_placed_as(was) or not self._placed.data.train.is_sound:
            return None
        return dataclasses.replace(self._placed, setup=setup)

    def whitening_kernel(self, setup: Setup) -> np.ndarray | None:
        """The kernel of the network's frozen stem, if it has one: host 0's, on every host."""
        if setup.config.model.stem != "whitened":
            return None
        network = setup.program.network
        if network.patches not in self._kernels:
            # Of the files as they were when the data were placed.
            for attempt in augment.cache_attempts(setup.config, to_train=True, look_at_source=False):
                with attempt as cache:
                    kernel = np.zeros(models.whitening_shape(network, cache.image_shape), np.float32)
                    if collectives.is_primary():
                        rows = np.arange(min(WHITENING_IMAGES, cache.count("train")))
                        images = cache.read_rows("train", rows).reshape(-1, *cache.image_shape)
                        kernel = models.whitening_kernel(
                            network, images, cache.manifest["mean"], cache.manifest["std"]
                        )
            self._kernels[network.patches] = collectives.from_primary(kernel)
        return self._kernels[network.patches]

    def compiled(self, setup: Setup) -> CompiledPrograms:
        """The programs of `setup`, compiled if they are not there yet.

        They are compiled by running them once, so the data that were loaded last must be those of `setup`.
        """
        placed = self._placed
        assert setup.program.dataset == placed.setup.program.dataset, "another data set was loaded since"
        if setup.program not in self._programs:
            if len(self._programs) == MAX_PROGRAMS:
                self._programs.clear()
                jax.clear_caches()
            self._programs[setup.program] = compile_programs(
                make_parts(setup.program),
                placed.data,
                setup.schedule.inputs(0, setup.program.inputs_length),
                setup.sync,
                self.whitening_kernel(setup),
                self.local_devices,
            )
        return self._programs[setup.program]


# ---- the experiment ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Validation:
    """The result of a validation, over all validation examples."""

    scores: Scores
    kept: SplitRows  # see Task.kept; of the plain parameters, and still on the devices
    variables: dict  # of the network, on every device
    other_scores: dict[str, float]  # over views and shifts, of the moving average; by the name of their metric


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run that is ready to train. Where the batch grows, the trainer's schedule goes beyond this one's."""

    setup: Setup
    cache: Cache
    data: DeviceData
    programs: CompiledPrograms
    num_params: int
    flops_per_image: float  # of a training image, forward and backward

    def validate(self, state: TrainState) -> Validation:
        """Validates the parameters, and beside them what the config asks for; on every host.

        Raises:
          RuntimeError: the replicas no longer hold the same parameters.
          UserError: validation images that do not stay on the devices cannot be read.
        """
        programs, others, name = self.programs, {}, self.setup.program.task.kind.score_column
        if programs.predict_views:
            others[f"{name}_views"] = self._score(programs.predict_views, state.variables)
        if state.ema is not None:
            others[f"{name}_ema"] = self._score(programs.predict, state.ema_variables)
        if state.ema is not None and programs.predict_views:
            others[f"{name}_ema_views"] = self._score(programs.predict_views, state.ema_variables)
        # Last, since its rows are kept: no other ones are on the devices beside them.
        plain = self._predict(programs.predict, state.variables)
        replicas.check_replicas(state.variables, "parameters")
        return Validation(plain.scores, plain.rows, state.variables, others)

    def outcome(self, validation: Validation) -> Outcome:
        """What the run's folder gets of a validation, if it is the best."""
        if self.setup.program.task.kind.of_pixels:
            return CasesToWrite(validation.kept, functools.partial(self._cases, validation.variables))
        return Predictions(self.data.validation.labels, validation.kept, self.data.val_ids)

    def _cases(self, variables: dict, numbers: np.ndarray, scores: np.ndarray) -> Cases:
        """Predicts these validation examples once more, on one device."""
        task, cache = self.setup.program.task, self.cache
        stored = self.data.validation.images_of(numbers).reshape(-1, *cache.image_shape)
        images, truth = split_planes(stored, task.target_planes)
        return Cases(
            ids=self.data.val_ids[numbers],
            scores=scores,
            columns=np.array(task.kept_names),
            classes=np.array(cache.targets.classes, str),
            images=images,
            truth=truth,
            predicted=np.asarray(self.programs.predict_images(replicas.first_replica(variables), images)),
        )

    def locate_nonfinite(self, state: TrainState, update: UpdateInputs) -> str:
        """The first layer, from input to output, that is not finite in an update of `state`; in words."""
        program, step = self.setup.program, self.programs.parts.step
        normalise = make_normalise(program.network, program.image_shape, program.mean, program.std)
        inputs, seed = jax.tree.map(np.atleast_1d, update), replicas.first_replica(state.seed)
        data = load_inputs(self.data.train, program.sharding, seed, inputs).arrays
        return locate_nonfinite(program.network, normalise, step, state, data, update)

    def _predict(self, predict, variables) -> SplitPredictions:
        micro_batch_size = self.setup.program.prediction_micro_batch_size
        return predict_split(predict, variables, self.data.validation, micro_batch_size, self.setup.program.task)

    def _score(self, predict, variables) -> float:
        return self._predict(predict, variables).scores.score


def prepare(config, clock: Clock, shared: ProgramCache) -> tuple[Experiment, TrainState]:
    """Places the data, compiles the programs and makes the state before the first update.

    Args:
      clock: takes the seconds of the sections "data" and "compile".
      shared: keeps data and programs for the next run of this process.
    Raises:
      BadSetting, UserError: see `ProgramCache.load`.
    """
    with clock.measure("data"):
        placed = shared.load(config)
    setup = placed.setup
    with clock.measure("compile"):
        compiled = shared.compiled(setup)
        kernel = shared.whitening_kernel(setup)
        one_replica = compiled.parts.init(np.uint32(config.seed), setup.hyperparams, kernel)
        state = replicas.replicate(one_replica, shared.local_devices)
        replicas.check_replicas(state.params, "initial parameters")
    experiment = Experiment(
        setup=setup,
        cache=placed.cache,
        data=placed.data,
        programs=compiled,
        num_params=count_params(one_replica.params),
        flops_per_image=training_costs(setup.program.network, setup.program.image_shape).flops,
    )
    return experiment, state

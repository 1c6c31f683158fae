"""batch.micro_batch_size "auto", by device and network."""

import model
from benchmarks import micro_batches as command
from largebatch.hardware import micro_batches
from largebatch.hardware.chips import TPUS, Hardware
from largebatch.hardware.targets import TPU_GENERATIONS


def test_the_table_has_what_the_command_measures():
    measured = {TPU_GENERATIONS[name.partition(":")[0]] for name in command.TARGETS}
    assert set(micro_batches.TPU_SIZES) == measured <= set(TPUS)
    for sizes in micro_batches.TPU_SIZES.values():
        assert set(sizes) == set(command.NETWORKS) <= set(model.MODELS)


def test_sizes_are_those_of_the_table_or_the_guess():
    v3, gpu = Hardware("tpu", "TPU v3", 32), Hardware("gpu", "NVIDIA H200", 1)
    assert micro_batches.auto_micro_batch_size(v3, "convnet") == 2700
    assert micro_batches.auto_micro_batch_size(v3, "of tomorrow") == micro_batches.SIZE_ELSEWHERE
    assert micro_batches.auto_micro_batch_size(gpu, "convnet") == micro_batches.SIZE_ELSEWHERE
    assert micro_batches.auto_micro_batch_size(Hardware("cpu", "cpu", 2), "convnet") == 16


def test_the_best_has_the_fewest_cycles_of_those_that_leave_room():
    def row(size, cycles, share):
        key = {"device_kind": "TPU v3", "network": "convnet", "micro_batch_size": size}
        return key | {"cycles_per_image": cycles, "share_of_memory": share}

    too_large = {"device_kind": "TPU v3", "network": "convnet", "micro_batch_size": 8, "error": "does not fit"}
    rows = [row(1, 30.0, 0.1), row(2, 20.0, 0.2), row(4, 10.0, 0.9), too_large]
    assert command.best(rows) == {"TPU v3, convnet": 2}

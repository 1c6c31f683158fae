"""The micro-batch size that batch.micro_batch_size = "auto" stands for."""

from collections.abc import Callable

from largebatch.hardware.chips import Hardware

# On TPUs: fewest cycles an image by the compiler, of a full batch of EuroSAT's images; of ImageNet's for ResNet-50
# (python bench.py micro_batches, docs/hardware.md). On a v5e the activations of so few stay on the chip.
TPU_SIZES = {
    "TPU v3": {"convnet": 5400, "resconvnet": 5400, "resconvnet7": 5400, "resnet8": 1350, "resnet50": 64},
    "TPU v5 lite": {"convnet": 338, "resconvnet": 338, "resconvnet7": 338, "resnet8": 338, "resnet50": 64},
    "TPU v6 lite": {"convnet": 1350, "resconvnet": 1350, "resconvnet7": 1350, "resnet8": 1350, "resnet50": 64},
}
CPU_SIZE = 16  # best of 16 to 256 on a core (LOG.md)
# On GPUs: bytes of a micro-batch's activations. In the convnet in bfloat16 an image of EuroSAT has 246,312 of them,
# and on an H200 a full batch takes 195.7 ms in micro-batches of 1,080, 169.2 ms of 2,700, 154.0 ms of 5,400 and
# 178.1 ms of 21,600. That is a thirtieth of the memory of the smallest card in chips.py, so there is room.
GPU_ACTIVATION_BYTES = 5_400 * 246_312
SIZE_ELSEWHERE = 1024  # a guess, for TPUs and networks that were not compiled


def auto_micro_batch_size(hardware: Hardware, network: str, activation_bytes: Callable[[], int]) -> int:
    """Examples per gradient evaluation of one device.

    On GPUs it was measured for one network on one card, the H200. For others it is extrapolated: arrays of as many
    bytes fill a card as well.

    Args:
      network: a config's model.name.
      activation_bytes: gives the bytes that an image's activations take; asked on GPUs.
    """
    if hardware.platform == "cpu":
        return CPU_SIZE
    if hardware.platform == "gpu":
        return max(GPU_ACTIVATION_BYTES // activation_bytes(), 1)
    return TPU_SIZES.get(hardware.device_kind, {}).get(network, SIZE_ELSEWHERE)

"""The micro-batch size that batch.micro_batch_size = "auto" stands for."""

from largebatch.hardware.chips import Hardware

# On TPUs: fewest cycles an image by the compiler, of a full batch of EuroSAT's images; of ImageNet's for ResNet-50
# (python bench.py micro_batches, docs/hardware.md). On a v5e the activations of so few stay on the chip.
TPU_SIZES = {
    "TPU v3": {"convnet": 2700, "resconvnet": 2700, "resconvnet7": 2700, "resnet8": 1350, "resnet50": 64},
    "TPU v5 lite": {"convnet": 338, "resconvnet": 338, "resconvnet7": 338, "resnet8": 338, "resnet50": 64},
    "TPU v6 lite": {"convnet": 1350, "resconvnet": 1350, "resconvnet7": 1350, "resnet8": 1350, "resnet50": 64},
}
CPU_SIZE = 16  # best of 16 to 256 on a core (LOG.md)
SIZE_ELSEWHERE = 1024  # a guess: enough to fill a GPU


def auto_micro_batch_size(hardware: Hardware, network: str) -> int:
    """Examples per gradient evaluation of one device.

    Args:
      network: a config's model.name.
    """
    if hardware.platform == "cpu":
        return CPU_SIZE
    return TPU_SIZES.get(hardware.device_kind, {}).get(network, SIZE_ELSEWHERE)

"""Plain PyTorch on the same network, with the same images resident as uint8.

pip install -r benchmarks/peers/torch_requirements.txt
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import timing


def make_network(stem_channels: int = timing.IMAGE_SHAPE[-1]) -> nn.Sequential:
    """Make the network of all contenders; more channels of the stem than an image has see zeros."""
    layers, channels = [], stem_channels
    for features in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, features, 3, stride=2, padding=1), nn.GELU("tanh")]
        channels = features
    head = [nn.Linear(channels, 128), nn.GELU("tanh"), nn.Linear(128, timing.NUM_CLASSES)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


class TorchStep:
    """A step of Adam.

    Options are "batch_size", "micro_batch_size" (the whole batch), "cuda", "channels_last", "autocast" to bfloat16,
    "compile", "mode" of torch.compile, as "reduce-overhead" for CUDA graphs, and "stem_channels": images are padded
    by zeros to so many channels, as tensor cores want them. What is not given is off.
    """

    def __init__(self, options: dict):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self._device = "cuda" if options.get("cuda") else "cpu"
        self._autocast, self._batch_size = options.get("autocast", False), options["batch_size"]
        self._micro_batch_size = options.get("micro_batch_size") or self._batch_size
        self._stem_channels = max(options.get("stem_channels", 0), timing.IMAGE_SHAPE[-1])
        self._generator = torch.Generator(self._device).manual_seed(0)

        layout = torch.channels_last if options.get("channels_last") else torch.contiguous_format
        images, labels = (torch.from_numpy(array).to(self._device) for array in timing.random_images())
        self._images = images.permute(0, 3, 1, 2).contiguous(memory_format=layout)
        self._labels = labels.long()
        self._network = make_network(self._stem_channels).to(self._device, memory_format=layout)
        self._optimizer = torch.optim.Adam(self._network.parameters(), timing.LEARNING_RATE, fused=True)
        mode, self._loss_fn = options.get("mode") or None, self._loss
        if options.get("compile"):
            self._loss_fn = torch.compile(self._loss, mode=mode, dynamic=False)

    def _loss(self, index):
        """Return the share of the images `index` in the loss of the batch."""
        normalised = (self._images[index].float() - timing.MEAN) * (1 / timing.STD)
        if missing := self._stem_channels - normalised.shape[1]:
            normalised = functional.pad(normalised, (0, 0, 0, 0, 0, missing))
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            logits = self._network(normalised)
        losses = functional.cross_entropy(logits.float(), self._labels[index], reduction="sum")
        return losses / self._batch_size

    def run(self, count: int) -> None:
        """Do so many steps and wait for them."""
        for _ in range(count):
            self._optimizer.zero_grad()
            # Drawn on the device: the host has other things to do.
            drawn = torch.randint(
                timing.NUM_IMAGES, (self._batch_size,), generator=self._generator, device=self._device
            )
            for index in drawn.split(self._micro_batch_size):
                torch.compiler.cudagraph_mark_step_begin()
                self._loss_fn(index).backward()
            self._optimizer.step()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def facts(self) -> dict:
        """Return versions and the device."""
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "device": self._device}

    def steps(self) -> int:
        """Return the number of steps so far, by the optimizer."""
        states = iter(self._optimizer.state.values())
        return int(next(states)["step"]) if self._optimizer.state else 0

    def params(self) -> list[np.ndarray]:
        """Return all parameters."""
        return [np.asarray(p.detach().float().cpu()) for p in self._network.parameters()]


build = TorchStep

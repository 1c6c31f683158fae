"""Plain PyTorch on the same network, with the same images resident as uint8.

pip install -r benchmarks/peers/torch_requirements.txt
python -m benchmarks.peers.torch_step --batch_size 512 --micro_batch_size 128 --channels_last --autocast --compile
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers import serve

# micro_batch_size 0 is the whole batch; autocast computes in bfloat16; mode is that of torch.compile, as
# "reduce-overhead" for CUDA graphs; images have at least stem_channels, padded by zeros, as tensor cores want them.
DEFAULTS = {
    "batch_size": 512,
    "micro_batch_size": 0,
    "channels_last": False,
    "autocast": False,
    "compile": False,
    "mode": "",
    "stem_channels": 0,
}


def make_network(stem_channels: int = serve.IMAGE_SHAPE[-1]) -> nn.Sequential:
    """The seed network, padded as ours is.

    Channels of the stem beyond those of the image see zeros, and so neither act nor learn.
    """
    layers, channels = [], stem_channels
    for features in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, features, 3, stride=2, padding=1), nn.GELU("tanh")]
        channels = features
    head = [nn.Linear(channels, 128), nn.GELU("tanh"), nn.Linear(128, serve.NUM_CLASSES)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


class TorchStep(serve.Step):
    """A step on the GPU if there is one; options as in DEFAULTS."""

    def __init__(self, options: dict):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._autocast = options["autocast"]
        self._batch_size = options["batch_size"]
        self._micro_batch_size = options["micro_batch_size"] or self._batch_size
        self._stem_channels = max(options.get("stem_channels", 0), serve.IMAGE_SHAPE[-1])
        self._generator = torch.Generator(self._device).manual_seed(0)
        self._left = torch.empty(0, dtype=torch.int64, device=self._device)

        layout = torch.channels_last if options["channels_last"] else torch.contiguous_format
        images, labels = (torch.from_numpy(array).to(self._device) for array in serve.random_images())
        self._images = images.permute(0, 3, 1, 2).contiguous(memory_format=layout)
        self._labels = labels.long()
        self._network = make_network(self._stem_channels).to(self._device, memory_format=layout)
        self._optimizer = torch.optim.Adam(self._network.parameters(), serve.LEARNING_RATE, fused=True)
        mode = options.get("mode") or None
        self._loss_fn = torch.compile(self._loss, mode=mode, dynamic=False) if options["compile"] else self._loss

    def _loss(self, index):
        """The share of the images `index` in the loss of the batch."""
        normalised = (self._images[index].float() - serve.MEAN) * (1 / serve.STD)
        missing = self._stem_channels - normalised.shape[1]
        if missing:
            normalised = functional.pad(normalised, (0, 0, 0, 0, 0, missing))
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            logits = self._network(normalised)
        losses = functional.cross_entropy(logits.float(), self._labels[index], reduction="sum")
        return losses / self._batch_size

    def _next_batch(self) -> torch.Tensor:
        """Indices of images, each once a pass, drawn on the device: the host has other things to do."""
        missing = self._batch_size - len(self._left)
        passes = [
            torch.randperm(serve.NUM_IMAGES, generator=self._generator, device=self._device)
            for _ in range(-(-max(missing, 0) // serve.NUM_IMAGES))
        ]
        drawn = torch.cat([self._left, *passes])
        self._left = drawn[self._batch_size :]
        return drawn[: self._batch_size]

    def run(self, updates: int) -> None:
        """See `serve.Step`."""
        for _ in range(updates):
            self._optimizer.zero_grad()
            for index in self._next_batch().split(self._micro_batch_size):
                torch.compiler.cudagraph_mark_step_begin()
                self._loss_fn(index).backward()
            self._optimizer.step()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def facts(self) -> dict:
        """Versions, and the most bytes in use so far on the card."""
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": self._device}
        return versions | {"peak_bytes": torch.cuda.max_memory_allocated() if self._device == "cuda" else None}

    def updates(self) -> int:
        """See `serve.Step`."""
        states = iter(self._optimizer.state.values())
        return int(next(states)["step"]) if self._optimizer.state else 0

    def params(self) -> list[np.ndarray]:
        """See `serve.Step`."""
        return [np.asarray(p.detach().float().cpu()) for p in self._network.parameters()]


if __name__ == "__main__":
    serve.main(TorchStep, DEFAULTS)

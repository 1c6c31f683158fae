"""Plain PyTorch on the same network, with the same images resident as uint8.

pip install -r benchmarks/peers/torch_requirements.txt
python -m benchmarks.peers.torch_step --batch_size 512 --micro_batch_size 128 --channels_last --autocast --compile
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers import serve

DEFAULTS = {"batch_size": 512, "micro_batch_size": 0, "channels_last": False, "autocast": False, "compile": False}


def make_network() -> nn.Sequential:
    """The seed network. Padding stands before the image, in JAX's "SAME" behind it: mirrored, it is the same."""
    layers, channels = [], serve.IMAGE_SHAPE[-1]
    for features in (32, 64, 128, 256):
        layers += [nn.Conv2d(channels, features, 3, stride=2, padding=1), nn.GELU("tanh")]
        channels = features
    head = [nn.Linear(channels, 128), nn.GELU("tanh"), nn.Linear(128, serve.NUM_CLASSES)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def build(options: dict) -> serve.Step:
    """A step on the GPU if there is one; `autocast` computes in bfloat16."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if options["channels_last"] else torch.contiguous_format
    images, labels = (torch.from_numpy(array).to(device) for array in serve.random_images())
    images, labels = images.permute(0, 3, 1, 2).contiguous(memory_format=layout), labels.long()
    network = make_network().to(device, memory_format=layout)
    optimizer = torch.optim.Adam(network.parameters(), serve.LEARNING_RATE, fused=True)
    batch_size = options["batch_size"]
    size = options["micro_batch_size"] or batch_size
    chosen = serve.batches(batch_size)

    def loss_fn(index):
        normalised = (images[index].float() - serve.MEAN) * (1 / serve.STD)
        with torch.autocast(device, torch.bfloat16, enabled=options["autocast"]):
            logits = network(normalised)
        return functional.cross_entropy(logits.float(), labels[index], reduction="sum") / batch_size

    if options["compile"]:
        loss_fn = torch.compile(loss_fn)

    def run(rounds):
        for _ in range(rounds):
            batch = torch.from_numpy(next(chosen)).to(device)
            optimizer.zero_grad()
            for index in batch.split(size):
                loss_fn(index).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    def updates():
        return int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0

    return serve.Step(run, updates, lambda: [np.asarray(p.detach().float().cpu()) for p in network.parameters()])


if __name__ == "__main__":
    serve.main(build, DEFAULTS)

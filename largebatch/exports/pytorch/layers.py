import collections
import json

from safetensors.torch import load_file
from torch.nn import functional as F

with open("model.json") as file:
    ABOUT = json.load(file)
NET, ARRAYS = ABOUT["network"], load_file("model.safetensors")  # {name: .to(device)} for another device


def rounded(x):  # in a network of bfloat16 what is multiplied is rounded; sums are float32
    return x.bfloat16().float() if NET["dtype"] == "bfloat16" else x


def normalised(images):  # integers [N, H, W, C] -> [N, C, H, W]
    x, channels = images.float(), images.shape[-1]
    mean, std = (ABOUT["data"][name][:channels] for name in ("mean", "std"))
    return ((x - x.new_tensor(mean)) * x.new_tensor([1 / s for s in std])).permute(0, 3, 1, 2)


def convolved(x, kernel, stride=1, bias=None, padding=None, operand=rounded):
    padding = kernel.shape[0] // 2 if padding is None else padding
    return F.conv2d(operand(x), operand(kernel).permute(3, 2, 0, 1), bias, stride, padding)


class Layers:  # those below a name: of each kind they are numbered in the order of their calls
    def __init__(self, name=""):
        self.name, self.counts = name, collections.Counter()

    def next(self, kind):
        self.counts[kind] += 1
        return f"{self.name}{kind}_{self.counts[kind] - 1}"

    def conv(self, x, stride=1, padding=None):
        name = f"params.{self.next('Conv')}"
        return convolved(x, ARRAYS[f"{name}.kernel"], stride, ARRAYS.get(f"{name}.bias"), padding)

    def head(self, x):  # in float32
        return x @ ARRAYS["params.head.kernel"] + ARRAYS["params.head.bias"]

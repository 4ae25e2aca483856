"""VGG-16: `conv1` … `conv13`, `pool`, `hidden1`, `hidden2`, `head`.

Five of the convolutions end with a max pooling that halves the image, so 224 pixels become 7 and 32 become 1. The
published hidden layers of 4096 are for 7 x 7 pixels; with the stems 32 and 64, the result is one pixel, and the
hidden layers have 512.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from weft.train.data_spec import DataSpec
from weft.train.models.image_layers import Conv2d
from weft.train.models.options import VGG, stem_for

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # times the width, convolutions


def build_vgg(options: VGG, spec: DataSpec) -> nn.Sequential:
    """A model whose layers are initialized as in torchvision."""
    pixels = 7 if stem_for(options.stem, spec.size) == 224 else 1
    hidden = options.hidden or options.width * (64 if pixels == 7 else 8)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = spec.channels
    for times, count in STAGES:
        for number in range(count):
            last = number == count - 1
            layers[f"conv{len(layers) + 1}"] = _convolution(channels, times * options.width, options, halved=last)
            channels = times * options.width
    layers["pool"] = PoolAndFlatten(pixels)
    for number, features in enumerate((channels * pixels**2, hidden), 1):
        linear = Linear(features, hidden)
        layers[f"hidden{number}"] = nn.Sequential(
            OrderedDict(linear=linear, relu=nn.ReLU(), dropout=nn.Dropout(options.dropout))
        )
    layers["head"] = Linear(hidden, spec.classes)
    return nn.Sequential(layers)


class Linear(nn.Linear):
    """A linear layer that is initialized for its number of inputs."""

    def reset_parameters(self) -> None:
        std = 0.64 / math.sqrt(self.in_features)  # the published 0.01 is for 4096 and more inputs
        nn.init.normal_(self.weight, std=max(0.01, std))
        nn.init.zeros_(self.bias)


class PoolAndFlatten(nn.Module):
    """Average pooling to pixels x pixels, flattened."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, image: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(image, self.pixels).flatten(1)


def _convolution(channels: int, out: int, options: VGG, *, halved: bool) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=Conv2d(channels, out, 3, padding=1))
    if options.batch_norm:
        layers["norm"] = nn.BatchNorm2d(out)
    layers["relu"] = nn.ReLU()
    if halved:
        layers["pool"] = nn.MaxPool2d(2, ceil_mode=True)  # 28 pixels become 1, as 32 do
    return nn.Sequential(layers)

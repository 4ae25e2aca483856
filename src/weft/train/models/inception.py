"""Inception v3: `stem1` … `stem5`, `mixed1` … `mixed11`, `head`; optionally `auxiliary` after `mixed8`.

The published stem reduces 299 pixels to 35 and is also used for 224. The stems for 32 and 64 pixels have the same
convolutions and give 32 pixels: they have none and one of the three halvings.

The auxiliary classifier reads the image in the middle of the model. In training its logits are passed on with the
image, and the model returns both; in evaluations it is skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import WeftError
from weft.train.data_spec import DataSpec
from weft.train.models.image_layers import Pool, channels_last
from weft.train.models.options import Inception, stem_for

LEAST = 75  # smallest image, in pixels, for the published stem and the later halvings


class Conv(NamedTuple):
    """A convolution with norm and ReLU, in the description of a branch."""

    channels: int
    size: tuple[int, int] = (1, 1)
    stride: int = 1
    padded: bool = True


Fork: TypeAlias = "list[Conv]"  # parallel convolutions at the end of a branch
Branch: TypeAlias = "tuple[Conv | Fork | str, ...]"  # a string is a pooling: "mean" or "max"
Scale: TypeAlias = Callable[[int], int]  # published number of channels -> number in this model


def build_inception(options: Inception, spec: DataSpec) -> nn.Sequential:
    """A model whose layers are initialized as in torchvision."""
    small = options.size == "small" and not 48 < spec.size < LEAST
    made_for = stem_for(options.stem, spec.size, larger=small)
    if made_for == 224 and spec.size < LEAST:
        raise WeftError(
            f"inception_v3's stem for 224 needs {LEAST} pixels (stem: 224, size: {spec.size}); set model.stem=0"
        )

    def scale(channels: int) -> int:
        return max(1, channels // options.divisor)

    layers = _stem(spec.channels, made_for, scale)
    channels = scale(192)
    for number, branches in enumerate(_mixed(), 1):
        layers[f"mixed{number}"] = mixed = Mixed(channels, branches, scale)
        channels = mixed.channels
        if options.auxiliary and number == 8:
            layers["auxiliary"] = Auxiliary(channels, spec.classes, scale)
    layers["head"] = Head(channels, spec.classes, options.dropout)
    return nn.Sequential(layers)


# The published sizes

SQUARE, LARGE, ROW, COLUMN = (3, 3), (5, 5), (1, 7), (7, 1)


def _stem(channels: int, made_for: int, scale: Scale) -> OrderedDict[str, nn.Module]:
    published = made_for == 224
    first = Conv(32, SQUARE, stride=1 if made_for == 32 else 2, padded=not published)
    convs = (
        first,
        Conv(32, SQUARE, padded=not published),
        Conv(64, SQUARE),
        Conv(80),
        Conv(192, SQUARE, padded=not published),
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, conv in enumerate(convs, 1):
        layer = layers[f"stem{number}"] = NormConv(channels, conv, scale)
        channels = scale(conv.channels)
        if published and number in (3, 5):
            layer.append(nn.MaxPool2d(3, stride=2))
    return layers


def _mixed() -> Iterator[tuple[Branch, ...]]:
    """The branches of each block, whose channels are concatenated."""
    halving = Conv(96, SQUARE, stride=2, padded=False)
    for pooled in (32, 64, 64):
        yield (
            (Conv(64),),
            (Conv(48), Conv(64, LARGE)),
            (Conv(64), Conv(96, SQUARE), Conv(96, SQUARE)),
            ("mean", Conv(pooled)),
        )
    yield (halving._replace(channels=384),), (Conv(64), Conv(96, SQUARE), halving), ("max",)
    for n in (128, 160, 160, 192):
        yield (
            (Conv(192),),
            (Conv(n), Conv(n, ROW), Conv(192, COLUMN)),
            (Conv(n), Conv(n, COLUMN), Conv(n, ROW), Conv(n, COLUMN), Conv(192, ROW)),
            ("mean", Conv(192)),
        )
    yield (
        (Conv(192), halving._replace(channels=320)),
        (Conv(192), Conv(192, ROW), Conv(192, COLUMN), halving._replace(channels=192)),
        ("max",),
    )
    fork = [Conv(384, (1, 3)), Conv(384, (3, 1))]
    for _ in range(2):
        yield (Conv(320),), (Conv(384), fork), (Conv(448), Conv(384, SQUARE), fork), ("mean", Conv(192))


# Layers


class Conv2d(nn.Conv2d):
    """A convolution without bias."""

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.1)


class Linear(nn.Linear):
    """A linear layer whose initial weights have a given standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, std: float = 0.1) -> None:
        self.std = std  # first, because the constructor calls `reset_parameters`
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.weight, std=self.std)


class NormConv(nn.Sequential):
    """A convolution with norm and ReLU."""

    def __init__(self, channels: int, conv: Conv, scale: Scale) -> None:
        out = scale(conv.channels)
        padding = (conv.size[0] // 2, conv.size[1] // 2) if conv.padded else 0
        layer = Conv2d(channels, out, conv.size, stride=conv.stride, padding=padding, bias=False)
        super().__init__(OrderedDict(conv=layer, norm=nn.BatchNorm2d(out, eps=1e-3), relu=nn.ReLU()))

    def forward(self, image: Tensor) -> Tensor:
        image = channels_last(image)
        for layer in self:
            image = layer(image)
        return image


class Mixed(nn.Module):
    """Parallel branches. Auxiliary logits, if any, are passed on unchanged."""

    def __init__(self, channels: int, branches: tuple[Branch, ...], scale: Scale) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        self.channels = 0
        for branch in branches:
            layers, out = _branch(channels, branch, scale)
            self.branches.append(layers)
            self.channels += out

    def forward(self, carry: Any) -> Any:
        image, *logits = carry if isinstance(carry, tuple) else (carry,)
        image = channels_last(image)
        mixed = torch.cat([branch(image) for branch in self.branches], dim=1)
        return (mixed, *logits) if logits else mixed


class ParallelConvs(nn.Module):
    """The concatenated channels of several convolutions of one image."""

    def __init__(self, channels: int, fork: Fork, scale: Scale) -> None:
        super().__init__()
        self.convs = nn.ModuleList(NormConv(channels, conv, scale) for conv in fork)

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([conv(image) for conv in self.convs], dim=1)


def _branch(channels: int, branch: Branch, scale: Scale) -> tuple[nn.Sequential, int]:
    """The layers of a branch and its number of output channels."""
    layers = nn.Sequential()
    for part in branch:
        if isinstance(part, Conv):
            layers.append(NormConv(channels, part, scale))
            channels = scale(part.channels)
        elif not isinstance(part, str):
            layers.append(ParallelConvs(channels, part, scale))
            channels = sum(scale(conv.channels) for conv in part)
        else:
            layers.append(nn.AvgPool2d(3, stride=1, padding=1) if part == "mean" else nn.MaxPool2d(3, stride=2))
    return layers, channels


class Auxiliary(nn.Module):
    """The small auxiliary classifier in the middle of the model, for training only."""

    def __init__(self, channels: int, classes: int, scale: Scale) -> None:
        super().__init__()
        self.conv1 = NormConv(channels, Conv(128), scale)
        self.conv2 = NormConv(scale(128), Conv(768, LARGE, padded=False), scale)
        self.output = Linear(scale(768), classes, std=0.001)

    def forward(self, image: Tensor) -> Any:
        if not self.training:
            return image
        pixels = image.shape[-1]  # 17 for images of 299; smaller images reach the same 5 x 5 by adaptive pooling
        pooled = functional.avg_pool2d(image, 5, 3) if pixels >= 17 else functional.adaptive_avg_pool2d(image, 5)
        return image, self.output(self.conv2(self.conv1(pooled)).mean((2, 3)))


class Head(nn.Module):
    """The final classifier."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pool = Pool()
        self.dropout = nn.Dropout(dropout)
        self.output = Linear(channels, classes)

    def forward(self, carry: Any) -> Any:
        image, *logits = carry if isinstance(carry, tuple) else (carry,)
        output = self.output(self.dropout(self.pool(image)))
        return (output, *logits) if logits else output

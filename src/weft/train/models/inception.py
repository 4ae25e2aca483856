"""Inception v3, part by part: `stem1` … `stem5`, `mixed1` … `mixed11`, `head`; if wanted, `auxiliary` after `mixed8`.

The stem as published brings 299 points to 35, and is used for 224 too. Those for 32 and 64 points keep its convolutions
and bring both to 32: they have none of its three halvings, and one.

The auxiliary classifier reads the image in the middle of the model. In training its logits travel along with the image,
and the model returns both; in an evaluation it rests.
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
from weft.train.models.image_layers import Pool, laid_out
from weft.train.models.options import Inception, stem_for

LEAST = 75  # points of which the published stem and the halvings after it leave something


class Conv(NamedTuple):
    """A convolution, its norm and ReLU, in the description of a branch."""

    channels: int
    size: tuple[int, int] = (1, 1)
    stride: int = 1
    padded: bool = True


Fork: TypeAlias = "list[Conv]"  # side by side, at the end of a branch
Branch: TypeAlias = "tuple[Conv | Fork | str, ...]"  # a text is a pooling: "mean" or "max"
Some: TypeAlias = Callable[[int], int]  # the published channels, divided


def build_inception(options: Inception, spec: DataSpec) -> nn.Sequential:
    """A model with random weights, as PyTorch's reference draws them."""
    small = options.size == "small" and not 48 < spec.size < LEAST
    made_for = stem_for(options.stem, spec.size, further=small)
    if made_for == 224 and spec.size < LEAST:
        raise WeftError(
            f"inception_v3's stem for 224 needs {LEAST} points (stem: 224, size: {spec.size}); set model.stem=0"
        )

    def some(channels: int) -> int:
        return max(1, channels // options.divisor)

    layers = _stem(spec.channels, made_for, some)
    channels = some(192)
    for number, branches in enumerate(_mixed(), 1):
        layers[f"mixed{number}"] = mixed = Mixed(channels, branches, some)
        channels = mixed.channels
        if options.auxiliary and number == 8:
            layers["auxiliary"] = Auxiliary(channels, spec.classes, some)
    layers["head"] = Head(channels, spec.classes, options.dropout)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
    if options.auxiliary:
        nn.init.trunc_normal_(model.get_submodule("auxiliary").output.weight, std=0.001)  # type: ignore[union-attr, arg-type]
    return model


# The published numbers

SQUARE, LARGE, ROW, COLUMN = (3, 3), (5, 5), (1, 7), (7, 1)


def _stem(channels: int, made_for: int, some: Some) -> OrderedDict[str, nn.Module]:
    whole = made_for == 224
    first = Conv(32, SQUARE, stride=1 if made_for == 32 else 2, padded=not whole)
    convs = (first, Conv(32, SQUARE, padded=not whole), Conv(64, SQUARE), Conv(80), Conv(192, SQUARE, padded=not whole))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, conv in enumerate(convs, 1):
        layer = layers[f"stem{number}"] = NormConv(channels, conv, some)
        channels = some(conv.channels)
        if whole and number in (3, 5):
            layer.append(nn.MaxPool2d(3, stride=2))
    return layers


def _mixed() -> Iterator[tuple[Branch, ...]]:
    """The branches of each part; at the end their channels are put together."""
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


# The parts


class NormConv(nn.Sequential):
    """A convolution, its norm and ReLU."""

    def __init__(self, channels: int, conv: Conv, some: Some) -> None:
        out = some(conv.channels)
        padding = (conv.size[0] // 2, conv.size[1] // 2) if conv.padded else 0
        layer = nn.Conv2d(channels, out, conv.size, stride=conv.stride, padding=padding, bias=False)
        super().__init__(OrderedDict(conv=layer, norm=nn.BatchNorm2d(out, eps=1e-3), relu=nn.ReLU()))

    def forward(self, image: Tensor) -> Tensor:
        image = laid_out(image)
        for layer in self:
            image = layer(image)
        return image


class Mixed(nn.Module):
    """Branches side by side. Auxiliary logits, if there are any, pass by."""

    def __init__(self, channels: int, branches: tuple[Branch, ...], some: Some) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        self.channels = 0
        for branch in branches:
            layers, out = _branch(channels, branch, some)
            self.branches.append(layers)
            self.channels += out

    def forward(self, carry: Any) -> Any:
        image, *logits = carry if isinstance(carry, tuple) else (carry,)
        image = laid_out(image)
        mixed = torch.cat([branch(image) for branch in self.branches], dim=1)
        return (mixed, *logits) if logits else mixed


class Beside(nn.Module):
    """The channels of several convolutions of one image."""

    def __init__(self, channels: int, fork: Fork, some: Some) -> None:
        super().__init__()
        self.convs = nn.ModuleList(NormConv(channels, conv, some) for conv in fork)

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([conv(image) for conv in self.convs], dim=1)


def _branch(channels: int, branch: Branch, some: Some) -> tuple[nn.Sequential, int]:
    """The layers of a branch, and the channels that it gives."""
    layers = nn.Sequential()
    for one in branch:
        if isinstance(one, Conv):
            layers.append(NormConv(channels, one, some))
            channels = some(one.channels)
        elif not isinstance(one, str):
            layers.append(Beside(channels, one, some))
            channels = sum(some(conv.channels) for conv in one)
        else:
            layers.append(nn.AvgPool2d(3, stride=1, padding=1) if one == "mean" else nn.MaxPool2d(3, stride=2))
    return layers, channels


class Auxiliary(nn.Module):
    """A small classifier of the image in the middle, in training only."""

    def __init__(self, channels: int, classes: int, some: Some) -> None:
        super().__init__()
        self.conv1 = NormConv(channels, Conv(128), some)
        self.conv2 = NormConv(some(128), Conv(768, LARGE, padded=False), some)
        self.output = nn.Linear(some(768), classes)

    def forward(self, image: Tensor) -> Any:
        if not self.training:
            return image
        points = image.shape[-1]  # 17 for images of 299; smaller ones are brought to the same 5 x 5 in another way
        pooled = functional.avg_pool2d(image, 5, 3) if points >= 17 else functional.adaptive_avg_pool2d(image, 5)
        return image, self.output(self.conv2(self.conv1(pooled)).mean((2, 3)))


class Head(nn.Module):
    """The classifier at the end."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.pool = Pool()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels, classes)

    def forward(self, carry: Any) -> Any:
        image, *logits = carry if isinstance(carry, tuple) else (carry,)
        own = self.output(self.dropout(self.pool(image)))
        return (own, *logits) if logits else own

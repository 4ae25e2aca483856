"""ResNet and ResNeXt: `stem`, `stage1_block1` …, `head`.

The stem reduces images to about 32 x 32 to 56 x 56 pixels for the first stage:

    32    a 3 x 3 convolution
    64    a 3 x 3 convolution of stride 2
    224   a 7 x 7 convolution of stride 2 and a max pooling of stride 2, as published
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from weft.train.data_spec import DataSpec
from weft.train.models.image_layers import Conv2d, Pool, channels_last
from weft.train.models.options import RESNETS, ResNet, stem_for

EXPANSION = 4  # output channels of a bottleneck, as a multiple of those of its stage


def build_resnet(options: ResNet, spec: DataSpec) -> nn.Sequential:
    """A model whose layers are initialized as in torchvision."""
    published = RESNETS[options.name]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = _stem(
        spec.channels, options.width, stem_for(options.stem, spec.size, larger=options.size == "small")
    )
    channels = options.width
    for stage, count in enumerate(min(blocks, options.blocks) for blocks in published.blocks):
        planes = options.width << stage
        inner = options.groups * published.group_width << stage if published.groups > 1 else planes
        for block in range(count):
            stride = 2 if stage and not block else 1
            name = f"stage{stage + 1}_block{block + 1}"
            if published.bottleneck:
                layers[name] = _bottleneck(channels, inner, EXPANSION * planes, stride, groups=options.groups)
                channels = EXPANSION * planes
            else:
                layers[name] = _basic(channels, planes, stride)
                channels = planes
    layers["head"] = nn.Sequential(OrderedDict(pool=Pool(), output=nn.Linear(channels, spec.classes)))
    return nn.Sequential(layers)


class Stem(nn.Sequential):
    """The first layers."""

    def forward(self, image: Tensor) -> Tensor:
        image = channels_last(image)
        for layer in self:
            image = layer(image)
        return image


class Residual(nn.Module):
    """The sum of a branch and the skip connection, which may be a projection."""

    def __init__(self, branch: nn.Module, skip: nn.Module | None) -> None:
        super().__init__()
        self.branch = branch
        self.skip = skip

    def forward(self, image: Tensor) -> Tensor:
        image = channels_last(image)
        return functional.relu(self.branch(image) + (image if self.skip is None else self.skip(image)))


def _stem(channels: int, width: int, made_for: int) -> nn.Module:
    size, stride = {32: (3, 1), 64: (3, 2), 224: (7, 2)}[made_for]
    layers = OrderedDict(_norm_conv("", channels, width, size, stride), relu=nn.ReLU())
    if made_for == 224:
        layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return Stem(layers)


def _norm_conv(
    number: str, channels: int, out: int, size: int, stride: int = 1, groups: int = 1
) -> OrderedDict[str, nn.Module]:
    """A convolution with its norm."""
    conv = Conv2d(channels, out, size, stride=stride, padding=size // 2, groups=groups, bias=False)
    return OrderedDict({f"conv{number}": conv, f"norm{number}": nn.BatchNorm2d(out)})


def _skip(channels: int, out: int, stride: int) -> nn.Module | None:
    return nn.Sequential(_norm_conv("", channels, out, 1, stride)) if stride > 1 or channels != out else None


def _basic(channels: int, out: int, stride: int) -> nn.Module:
    branch = OrderedDict(_norm_conv("1", channels, out, 3, stride), relu1=nn.ReLU(), **_norm_conv("2", out, out, 3))
    return Residual(nn.Sequential(branch), _skip(channels, out, stride))


def _bottleneck(channels: int, inner: int, out: int, stride: int, *, groups: int) -> nn.Module:
    branch = OrderedDict(
        _norm_conv("1", channels, inner, 1),
        relu1=nn.ReLU(),
        **_norm_conv("2", inner, inner, 3, stride, groups),
        relu2=nn.ReLU(),
        **_norm_conv("3", inner, out, 1),
    )
    return Residual(nn.Sequential(branch), _skip(channels, out, stride))

"""The options of each model, and the numbers of its sizes.

Torch-free, so that a job is checked and printed quickly. 0 (or an empty string) means "defined by the size":
`resolved()` inserts the numbers. What depends on the data (vocabulary, channels, classes) comes from its `DataSpec`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.errors import WeftError
from weft.train.config import option
from weft.train.models.huggingface_config import read_config

T = TypeVar("T", bound=Any)

GPT_SIZES = {
    "tiny": {"layers": 4, "width": 64, "heads": 4, "activation": "gelu"},
    "small": {"layers": 4, "width": 128, "heads": 4, "activation": "gelu"},
    "base": {"layers": 12, "width": 768, "heads": 12, "activation": "gelu_new"},
}
BERT_SIZES = {
    "tiny": {"layers": 2, "width": 128, "heads": 2},
    "small": {"layers": 4, "width": 256, "heads": 4},
    "base": {"layers": 12, "width": 768, "heads": 12},
}
MLP_SIZES = {
    "small": {"layers": 8, "width": 128},
    "full": {"layers": 8, "width": 1024},
}
STEMS = (0, 32, 64, 224)


@dataclass(frozen=True, kw_only=True)
class GPT:
    """A GPT-2, which predicts the next token. Its context is that of the data."""

    name: str
    size: str = option("small", "tiny (0.2 M), small (0.8 M) or base (GPT-2's 124 M)", allowed=tuple(GPT_SIZES))
    layers: int = option(0, "transformer blocks; 0: defined by the size", least=0)
    width: int = option(0, "features per token; 0: defined by the size", least=0)
    heads: int = option(0, "attention heads, a divisor of the width; 0: defined by the size", least=0)
    inner: int = option(0, "width inside a block's feed-forward part; 0: 4 x width", least=0)
    activation: str = option(
        "",
        "gelu_new (tanh, as in GPT-2) or gelu (exact, and 3 times as fast on CPUs); empty: defined by the size",
        allowed=("", "gelu", "gelu_new"),
    )
    dropout: float = option(0.0, "dropout probability", least=0, most=0.9)
    tied: bool = option(False, "share the weights of embedding and output, as in GPT-2")
    vocabulary: int = option(0, "size of the vocabulary; 0: that of the data", least=0)
    positions: int = option(0, "longest context; 0: that of the data", least=0)
    epsilon: float = option(0.0, "epsilon of the layer norms; 0: 1e-5", least=0)
    config: str = option("", "a transformers config.json (model_type gpt2), or its folder, that defines the sizes")
    weights: str = option(
        "", "initial weights: a safetensors file, or a folder of them, with the names of GPT2LMHeadModel"
    )

    def resolved(self) -> GPT:
        """The options with all sizes that do not depend on the data."""
        return _transformer(self, "gpt2", GPT_SIZES[self.size], epsilon=1e-5)


@dataclass(frozen=True, kw_only=True)
class BERT:
    """A BERT with a pooler and a classifier, for texts and pairs of texts."""

    name: str
    size: str = option("small", "tiny, small (published as mini) or base (BERT-base)", allowed=tuple(BERT_SIZES))
    layers: int = option(0, "transformer blocks; 0: defined by the size", least=0)
    width: int = option(0, "features per token; 0: defined by the size", least=0)
    heads: int = option(0, "attention heads, a divisor of the width; 0: defined by the size", least=0)
    inner: int = option(0, "width inside a block's feed-forward part; 0: 4 x width", least=0)
    dropout: float = option(0.1, "dropout probability", least=0, most=0.9)
    vocabulary: int = option(0, "size of the vocabulary; 0: that of the data", least=0)
    positions: int = option(0, "longest context; 0: 512, or that of the data if it is longer", least=0)
    epsilon: float = option(0.0, "epsilon of the layer norms; 0: 1e-12", least=0)
    config: str = option("", "a transformers config.json (model_type bert), or its folder, that defines the sizes")
    weights: str = option(
        "", "initial weights: a safetensors file, or a folder of them, with the names of transformers"
    )

    def resolved(self) -> BERT:
        """The options with all sizes that do not depend on the data."""
        return _transformer(self, "bert", BERT_SIZES[self.size], epsilon=1e-12)


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """A ResNet or ResNeXt. Small: a quarter of the channels or fewer, two blocks per stage, a larger stem."""

    name: str
    size: str = option("small", "small (for a laptop) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "image size that the stem is made for: 32, 64 or 224; 0: by the images", allowed=STEMS)
    blocks: int = option(0, "largest number of blocks in each of the four stages; 0: defined by the size", least=0)
    width: int = option(0, "channels after the stem; 0: defined by the size (full: 64)", least=0)
    groups: int = option(0, "groups of a ResNeXt's convolutions; 0: defined by the size", least=0)

    def resolved(self) -> ResNet:
        """The options with all sizes that do not depend on the data."""
        published = RESNETS[self.name]
        if self.groups > 1 and published.groups == 1:
            raise WeftError(f"{self.name} has no groups (groups: {self.groups}); use a resnext, or omit groups")
        if self.size == "full":
            sizes = {"blocks": max(published.blocks), "width": 64, "groups": published.groups}
        else:
            sizes = {"blocks": 2, "width": 16, "groups": min(published.groups, 4)}
        return _filled(self, sizes)


@dataclass(frozen=True, kw_only=True)
class VGG:
    """VGG-16. Small: a quarter of the channels."""

    name: str
    size: str = option("small", "small (for a laptop) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "image size that it is made for: 32, 64 or 224; 0: by the images", allowed=STEMS)
    width: int = option(0, "channels of the first layer; 0: defined by the size (full: 64)", least=0)
    hidden: int = option(
        0, "width of the two layers before the last; 0: 64 x width for images of 224, otherwise 8 x width", least=0
    )
    batch_norm: bool = option(False, "a batch norm after every convolution, unlike the original publication")
    dropout: float = option(0.5, "dropout probability before the last layers", least=0, most=0.9)

    def resolved(self) -> VGG:
        """The options with all sizes that do not depend on the data."""
        return _filled(self, {"width": 64 if self.size == "full" else 16})


@dataclass(frozen=True, kw_only=True)
class Inception:
    """Inception v3. Small: an eighth of the channels, a larger stem."""

    name: str
    size: str = option("small", "small (for a laptop) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "image size that the stem is made for: 32, 64 or 224; 0: by the images", allowed=STEMS)
    divisor: int = option(0, "divisor of all numbers of channels; 0: defined by the size (full: 1)", least=0)
    auxiliary: bool = option(
        False, "a second classifier in the middle, in training only; the weight of its loss is 0.4"
    )
    dropout: float = option(0.5, "dropout probability before the last layer", least=0, most=0.9)

    def resolved(self) -> Inception:
        """The options with all sizes that do not depend on the data."""
        return _filled(self, {"divisor": 1 if self.size == "full" else 8})


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Linear layers with ReLU; images are flattened."""

    name: str
    size: str = option("small", "small (8 x 128) or full (8 x 1024)", allowed=tuple(MLP_SIZES))
    layers: int = option(0, "linear layers before the last; 0: defined by the size", least=0)
    width: int = option(0, "features per layer; 0: defined by the size", least=0)
    dropout: float = option(0.0, "dropout probability", least=0, most=0.9)

    def resolved(self) -> MLP:
        """The options with all sizes that do not depend on the data."""
        return _filled(self, MLP_SIZES[self.size])


@dataclass(frozen=True, kw_only=True)
class CustomModel:
    """A function of the user that returns a model; called with the options, and with `spec` if it takes that."""

    name: str
    options: dict[str, Any] = option({}, "arguments of the function")

    def resolved(self) -> CustomModel:
        return self


@dataclass(frozen=True, kw_only=True)
class PublishedResNet:
    """A ResNet as it was published."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool = True
    groups: int = 1
    group_width: int = 64  # in the first stage


RESNETS = {
    "resnet18": PublishedResNet(blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet34": PublishedResNet(blocks=(3, 4, 6, 3), bottleneck=False),
    "resnet50": PublishedResNet(blocks=(3, 4, 6, 3)),
    "resnet101": PublishedResNet(blocks=(3, 4, 23, 3)),
    "resnet152": PublishedResNet(blocks=(3, 8, 36, 3)),
    "resnext50_32x4d": PublishedResNet(blocks=(3, 4, 6, 3), groups=32, group_width=4),
    "resnext101_32x8d": PublishedResNet(blocks=(3, 4, 23, 3), groups=32, group_width=8),
}

MODELS: dict[str, type] = {
    "gpt": GPT,
    "bert": BERT,
    **dict.fromkeys(RESNETS, ResNet),
    "vgg16": VGG,
    "inception_v3": Inception,
    "mlp": MLP,
}


def initial_std(options: GPT | BERT) -> float:
    """The standard deviation of a transformer's initial weights. That of GPT-2 and BERT (0.02) fits their width.

    A narrow model with such small weights changes by a large share in every update, which makes it sensitive to
    delayed gradients: with 0.02, the small GPT ends half a nat higher under wpipe.
    """
    return 0.02 if options.width >= 768 else float(options.width**-0.5)


def stem_for(stem: int, size: int, *, larger: bool = False) -> int:
    """The chosen stem, or the one for images of this size; `larger`: the next one, which leaves fewer pixels."""
    fits = 1 if size <= 48 else 2 if size <= 128 else 3
    return stem or STEMS[min(fits + larger, 3)]


def _filled(options: T, sizes: Mapping[str, Any]) -> T:
    """The options, with the numbers of a size where they are 0 or empty."""
    return dataclasses.replace(options, **{key: getattr(options, key) or value for key, value in sizes.items()})


def _transformer(options: T, model_type: str, sizes: Mapping[str, Any], *, epsilon: float) -> T:
    """The options override a config.json, which overrides the size."""
    found = read_config(options.config, options.weights, model_type)
    filled = dataclasses.replace(_filled(options, {**sizes, "epsilon": epsilon, **found}), config="")
    filled = _filled(filled, {"inner": 4 * filled.width})
    if filled.width % filled.heads:
        raise WeftError(
            f"the width of a {options.name} must be a multiple of its heads "
            f"(width: {filled.width}, heads: {filled.heads}); "
            f"use a width of {filled.heads * max(1, round(filled.width / filled.heads))}"
        )
    return filled

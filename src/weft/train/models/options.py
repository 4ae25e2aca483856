"""What can be said of each model: its options, and the numbers behind its sizes.

Torch-free, so that a job is checked and printed at once. 0 (or an empty text) stands for "as the size says":
`resolved()` puts the numbers in. What depends on the data (vocabulary, channels, classes) comes with its `DataSpec`.
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
    """A GPT-2: predicts the next token. Its context is the data's."""

    name: str
    size: str = option("small", "tiny (0.2 M), small (0.8 M) or base (GPT-2's 124 M)", allowed=tuple(GPT_SIZES))
    layers: int = option(0, "transformer blocks; 0: as the size says", least=0)
    width: int = option(0, "numbers a token; 0: as the size says", least=0)
    heads: int = option(0, "attention heads, a divisor of the width; 0: as the size says", least=0)
    inner: int = option(0, "width inside a block's feed-forward part; 0: 4 x width", least=0)
    activation: str = option(
        "",
        "gelu_new (by tanh, GPT-2's), or gelu (exact, and 3 times as fast on CPUs); empty: as the size says",
        allowed=("", "gelu", "gelu_new"),
    )
    dropout: float = option(0.0, "share of numbers left out in training", least=0, most=0.9)
    tied: bool = option(False, "one matrix for the embedding and the output, as GPT-2 has it")
    vocabulary: int = option(0, "tokens that the model knows; 0: those of the data", least=0)
    positions: int = option(0, "longest context that the model knows; 0: the data's", least=0)
    epsilon: float = option(0.0, "of the layer norms; 0: 1e-5", least=0)
    config: str = option("", "a transformers config.json (model_type gpt2), or its folder, to take the sizes from")
    weights: str = option(
        "", "a safetensors file, or a folder of them, with the names of GPT2LMHeadModel, to start from"
    )

    def resolved(self) -> GPT:
        """With every number that does not depend on the data."""
        return _transformer(self, "gpt2", GPT_SIZES[self.size], epsilon=1e-5)


@dataclass(frozen=True, kw_only=True)
class BERT:
    """A BERT with a pooler and a classifier on top: for pairs of texts and single ones."""

    name: str
    size: str = option("small", "tiny, small (published as mini) or base (BERT-base)", allowed=tuple(BERT_SIZES))
    layers: int = option(0, "transformer blocks; 0: as the size says", least=0)
    width: int = option(0, "numbers a token; 0: as the size says", least=0)
    heads: int = option(0, "attention heads, a divisor of the width; 0: as the size says", least=0)
    inner: int = option(0, "width inside a block's feed-forward part; 0: 4 x width", least=0)
    dropout: float = option(0.1, "share of numbers left out in training", least=0, most=0.9)
    vocabulary: int = option(0, "tokens that the model knows; 0: those of the data", least=0)
    positions: int = option(0, "longest context that the model knows; 0: 512, or the data's if that is longer", least=0)
    epsilon: float = option(0.0, "of the layer norms; 0: 1e-12", least=0)
    config: str = option("", "a transformers config.json (model_type bert), or its folder, to take the sizes from")
    weights: str = option("", "a safetensors file, or a folder of them, with the names of transformers, to start from")

    def resolved(self) -> BERT:
        """With every number that does not depend on the data."""
        return _transformer(self, "bert", BERT_SIZES[self.size], epsilon=1e-12)


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """A ResNet or ResNeXt. Small: a quarter of the channels or less, two blocks a stage, the stem of larger images."""

    name: str
    size: str = option("small", "small (a laptop's) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "images that the first layer is made for: 32, 64 or 224; 0: by size", allowed=STEMS)
    blocks: int = option(0, "at most so many blocks in each of the four stages; 0: as the size says", least=0)
    width: int = option(0, "channels after the stem; 0: as the size says (full: 64)", least=0)
    groups: int = option(0, "groups of a ResNeXt's convolutions; 0: as the size says", least=0)

    def resolved(self) -> ResNet:
        """With every number that does not depend on the data."""
        published = RESNETS[self.name]
        if self.groups > 1 and published.groups == 1:
            raise WeftError(f"{self.name} has no groups (groups: {self.groups}); use a resnext, or leave groups out")
        if self.size == "full":
            sizes = {"blocks": max(published.blocks), "width": 64, "groups": published.groups}
        else:
            sizes = {"blocks": 2, "width": 16, "groups": min(published.groups, 4)}
        return _filled(self, sizes)


@dataclass(frozen=True, kw_only=True)
class VGG:
    """VGG-16. Small: a quarter of the channels."""

    name: str
    size: str = option("small", "small (a laptop's) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "images that it is made for: 32, 64 or 224; 0: by their size", allowed=STEMS)
    width: int = option(0, "channels of the first layer; 0: as the size says (full: 64)", least=0)
    hidden: int = option(
        0, "width of the two layers before the last; 0: 4096 of 64 for images of 224, 512 of 64 else", least=0
    )
    batch_norm: bool = option(False, "a batch norm after every convolution, which the first publication has not")
    dropout: float = option(0.5, "share of numbers left out in training before the last layers", least=0, most=0.9)

    def resolved(self) -> VGG:
        """With every number that does not depend on the data."""
        return _filled(self, {"width": 64 if self.size == "full" else 16})


@dataclass(frozen=True, kw_only=True)
class Inception:
    """Inception v3. Small: an eighth of the channels, the stem of larger images."""

    name: str
    size: str = option("small", "small (a laptop's) or full (as published)", allowed=("small", "full"))
    stem: int = option(0, "images that the first layers are made for: 32, 64 or 224; 0: by their size", allowed=STEMS)
    divisor: int = option(0, "all channels are divided by it; 0: as the size says (full: 1)", least=0)
    auxiliary: bool = option(False, "a second classifier in the middle, in training only; its loss counts 0.4")
    dropout: float = option(0.5, "share of numbers left out in training before the last layer", least=0, most=0.9)

    def resolved(self) -> Inception:
        """With every number that does not depend on the data."""
        return _filled(self, {"divisor": 1 if self.size == "full" else 8})


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Linear layers with ReLU between them; images are flattened."""

    name: str
    size: str = option("small", "small (8 x 128) or full (8 x 1024)", allowed=tuple(MLP_SIZES))
    layers: int = option(0, "linear layers before the last; 0: as the size says", least=0)
    width: int = option(0, "numbers a layer; 0: as the size says", least=0)
    dropout: float = option(0.0, "share of numbers left out in training", least=0, most=0.9)

    def resolved(self) -> MLP:
        """With every number that does not depend on the data."""
        return _filled(self, MLP_SIZES[self.size])


@dataclass(frozen=True, kw_only=True)
class CustomModel:
    """A function of the user's own that returns a model, given the options (and `spec`, if it takes that)."""

    name: str
    options: dict[str, Any] = option({}, "arguments of the function")

    def resolved(self) -> CustomModel:
        return self


@dataclass(frozen=True, kw_only=True)
class Published:
    """A ResNet as it was published."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool = True
    groups: int = 1
    group_width: int = 64  # of the first stage


RESNETS = {
    "resnet18": Published(blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet34": Published(blocks=(3, 4, 6, 3), bottleneck=False),
    "resnet50": Published(blocks=(3, 4, 6, 3)),
    "resnet101": Published(blocks=(3, 4, 23, 3)),
    "resnet152": Published(blocks=(3, 8, 36, 3)),
    "resnext50_32x4d": Published(blocks=(3, 4, 6, 3), groups=32, group_width=4),
    "resnext101_32x8d": Published(blocks=(3, 4, 23, 3), groups=32, group_width=8),
}

MODELS: dict[str, type] = {
    "gpt": GPT,
    "bert": BERT,
    **dict.fromkeys(RESNETS, ResNet),
    "vgg16": VGG,
    "inception_v3": Inception,
    "mlp": MLP,
}


def spread_of(options: GPT | BERT) -> float:
    """The standard deviation of a transformer's first weights: that of GPT-2 and BERT is for their width.

    Narrow models with so small weights change by a large share of themselves in every update, which late gradients do
    not forgive: under wpipe, the small GPT stays half a nat above its loss with this one.
    """
    return 0.02 if options.width >= 768 else float(options.width**-0.5)


def stem_for(stem: int, size: int, *, further: bool = False) -> int:
    """The stem that fits images of a size, unless one is chosen; or the next one, which leaves fewer points."""
    fits = 1 if size <= 48 else 2 if size <= 128 else 3
    return stem or STEMS[min(fits + further, 3)]


def _filled(options: T, sizes: Mapping[str, Any]) -> T:
    """The options, with numbers of a size where they say nothing."""
    return dataclasses.replace(options, **{key: getattr(options, key) or value for key, value in sizes.items()})


def _transformer(options: T, model_type: str, sizes: Mapping[str, Any], *, epsilon: float) -> T:
    """What the options say themselves goes before a config.json, and that before the size."""
    found = read_config(options.config, options.weights, model_type)
    filled = dataclasses.replace(_filled(options, {**sizes, "epsilon": epsilon, **found}), config="")
    filled = _filled(filled, {"inner": 4 * filled.width})
    if filled.width % filled.heads:
        raise WeftError(
            f"the width of a {options.name} is a multiple of its heads (width: {filled.width}, heads: {filled.heads}); "
            f"use a width of {filled.heads * max(1, round(filled.width / filled.heads))}"
        )
    return filled

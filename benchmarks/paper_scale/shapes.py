"""The papers' models as numbers: what a layer computes, holds and hands over, for one sample. Formulas, no tensors.

A multiplication and an addition are two FLOPs; a backward is two forwards. Sizes are counted in values, so that a
precision can be chosen later. A dropout mask is a byte on a GPU (a quarter of an fp32 value), a value on a CPU.

The models are those that the authors of WPipe name in their public scripts: BERT with 96 and 192 layers and ResNeXt
with 200 and 302 on one machine of 8 devices, BERT with 384 and 768 on 8 such machines. (ResNeXt with 500 and 800 on
64 is left out: 64 x 2 chunks of 168 blocks differ by half, so the cut would decide everything.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from weft.errors import WeftError

VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2  # of BERT, uncased
WIDTH, HEADS, SEQUENCE = 768, 12, 128
IMAGE, CLASSES = 224, 102  # Oxford flowers

DEVICES = {
    "bert-96": 8,
    "bert-192": 8,
    "bert-384": 64,
    "bert-768": 64,
    "resnext-200": 8,
    "resnext-302": 8,
}
BLOCKS = {  # bottlenecks in the four stages; layers = 3 x their sum + 2
    50: (3, 4, 6, 3),
    200: (3, 24, 36, 3),
    302: (3, 38, 56, 3),
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The unit of a cut, with its numbers for one sample."""

    flops: float  # of a forward
    parameters: int
    input: float  # values of its input, and of their gradient
    kept: float  # values that a forward keeps for its backward, with the input


Chunks: TypeAlias = "list[Sequence[Layer]]"


@cache
def layers_of(model: str) -> tuple[Layer, ...]:
    """The layers of a model by its name, such as bert-96 or resnext-200."""
    kind, _, number = model.partition("-")
    if kind == "bert":
        return bert(int(number))
    if kind == "resnext" and int(number) in BLOCKS:
        return resnext(BLOCKS[int(number)])
    raise WeftError(f"the papers have no model {model!r}; choose one of {', '.join(DEVICES)}")


def bert_layer(*, width: int = WIDTH, heads: int = HEADS, sequence: int = SEQUENCE, mask: float = 0.25) -> Layer:
    """Attention and feed-forward of four times the width, `h` wide, for a sequence of `s`.

    FLOPs: the six matrices of h x h (query, key, value, projection) and h x 4h (up, down) are 12 h² weights, 2 FLOPs a
    token each: 24 s h². Scores and their mixture are s² h multiplications each: 4 s² h.
    Parameters: 12 h², 9 h biases (3 + 1 + 4 + 1), two norms of 2 h: 12 h² + 13 h.
    Kept: input, query, key, value, mixture, what the two norms normalise, the input of the feed-forward part (h each:
    8 h) and its 4h before and after the activation: 16 h a token; two dropout masks of h; s² scores a head as
    probabilities, with and without dropout, and the mask. Attention is the plain one of the papers' time, which keeps
    its scores.
    """
    s, h = sequence, width
    return Layer(
        flops=24 * s * h * h + 4 * s * s * h,
        parameters=12 * h * h + 13 * h,
        input=s * h,
        kept=s * h * (16 + 2 * mask) + heads * s * s * (2 + mask),
    )


def bert(layers: int) -> tuple[Layer, ...]:
    """Embedding, layers, and a head of pooler and classifier (2 classes), as in fine-tuning.

    The embedding looks up three tables and norms their sum. The head works on the first token alone, 2 h² FLOPs, a
    thousandth of a layer; it counts as none, as the embedding does.
    """
    s, h = SEQUENCE, WIDTH
    tables = (VOCABULARY + POSITIONS + SEGMENTS) * h + 2 * h
    embedding = Layer(flops=0, parameters=tables, input=s, kept=2 * s * h)
    head = Layer(flops=0, parameters=h * h + h + 2 * h + 2, input=s * h, kept=s * h + 3 * h)
    return (embedding, *[bert_layer()] * layers, head)


def bottleneck(channels: int, inner: int, out: int, size: int, *, stride: int = 1, groups: int = 32) -> Layer:
    """1 x 1, a grouped 3 x 3 and 1 x 1 convolution, each with a norm, beside a skip that is a 1 x 1 convolution where
    the form changes. Images are `size` x `size` before it.

    FLOPs: 2 x weights x points of the output; parameters: the weights, and two numbers a channel of a norm.
    Kept: the input, and for each convolution what its norm normalises; the two inner activations; the skip's likewise.
    The output is the next layer's input and counted there.
    """
    before, after = size * size, (size // stride) ** 2
    weights = (channels * inner, 9 * inner * inner // groups, inner * out)
    flops = 2 * (weights[0] * before + (weights[1] + weights[2]) * after)
    parameters = sum(weights) + 2 * (2 * inner + out)
    kept = channels * before + 2 * inner * before + 2 * inner * after + out * after
    if stride > 1 or channels != out:
        flops += 2 * channels * out * after
        parameters += channels * out + 2 * out
        kept += out * after
    return Layer(flops=flops, parameters=parameters, input=channels * before, kept=kept)


def resnext(blocks: Sequence[int]) -> tuple[Layer, ...]:
    """ResNeXt 32x4d in its ImageNet form: a 7 x 7 stem of stride 2 and a pool of stride 2, stages of 56, 28, 14 and 7
    points, 128, 256, 512 and 1024 channels in the groups and twice those at the output.

    The papers do not say how the blocks of the very deep models are distributed over the stages. Assumed: as in the
    published ResNet-200, three in the first and in the last, the rest as 2 to 3 in the second and third.
    """
    points = IMAGE // 4
    stem = Layer(
        flops=2 * 49 * 3 * 64 * (IMAGE // 2) ** 2,
        parameters=49 * 3 * 64 + 2 * 64,
        input=3 * IMAGE**2,
        kept=3 * IMAGE**2 + 2 * 64 * (IMAGE // 2) ** 2 + 64 * points**2,
    )
    layers, channels = [stem], 64
    for stage, count in enumerate(blocks):
        inner, out = 128 << stage, 256 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(bottleneck(channels, inner, out, points, stride=stride))
            channels, points = out, points // stride
    last = channels * points**2
    return (*layers, Layer(flops=2 * channels * CLASSES, parameters=(channels + 1) * CLASSES, input=last, kept=last))


def cut(layers: Sequence[Layer], stages: int, groups: int) -> Chunks:
    """Contiguous chunks, `groups` (one or two) a rank, whose largest numbers of FLOPs are the least possible.

    All ranks work in one group at a time, so for two groups the sum of both groups' largest chunks is minimised, then
    their difference.
    """
    if groups == 1:
        return _cut(layers, stages)
    half, near = len(layers) // 2, max(2, len(layers) // 16)
    ways = range(max(stages, half - near), min(len(layers) - stages, half + near) + 1)
    both = [(_cut(layers[:place], stages), _cut(layers[place:], stages)) for place in ways]

    def slowness(halves: tuple[Chunks, Chunks]) -> tuple[int, int]:
        first, second = (round(max(map(_flops, group))) for group in halves)
        return first + second, abs(first - second)

    first, second = min(both, key=slowness)
    return first + second


def _cut(layers: Sequence[Layer], chunks: int) -> Chunks:
    if chunks > len(layers):
        raise WeftError(f"a chunk needs a layer (layers: {len(layers)}, chunks: {chunks}); use fewer stages")
    low, high = 0.0, _flops(layers)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(layers, chunks, middle)) <= chunks else (middle, high)
    return _fill(layers, chunks, high)


def _fill(layers: Sequence[Layer], chunks: int, most: float) -> Chunks:
    """Chunks of at most `most` FLOPs (or of one layer), as few as possible, but at least `chunks`."""
    parts: Chunks = []
    start, flops = 0, 0.0
    for place, layer in enumerate(layers):
        left = len(layers) - place  # layers that are left, with this one
        if place > start and (flops + layer.flops > most or left < chunks - len(parts)):
            parts.append(layers[start:place])
            start, flops = place, 0.0
        flops += layer.flops
    return [*parts, layers[start:]]


def _flops(layers: Sequence[Layer]) -> float:
    return sum(layer.flops for layer in layers)

"""The models that benchmarks of throughput compute: lists of layers of about equal time, so that any cut is even.

No dropout, no batch statistics: every contender computes the same, and the first updates of all can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, the data of a mini-batch, and its loss; the same on every rank and in every call."""

    layers: Callable[[], list[nn.Module]]
    microbatch: Callable[[int], tuple[Tensor, Tensor]]  # so many samples
    samples: int  # of a micro-batch
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Sequential:
        """The whole model, at its first weights."""
        torch.manual_seed(0)
        return nn.Sequential(*self.layers())

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one mini-batch."""
        torch.manual_seed(1)
        return self.microbatch(self.samples * microbatches)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What everybody updates with: momentum, so that there is something to predict from."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


# Transformer


def transformer(*, layers: int = 8, width: int = 256, tokens: int = 128, samples: int = 4) -> Task:
    """Encoder layers and nothing else: a regression from vectors to vectors."""

    def made() -> list[nn.Module]:
        return [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)]

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, tokens, width), torch.randn(count, tokens, width)

    return Task(layers=made, microbatch=data, samples=samples, loss_fn=functional.mse_loss)


# ResNeXt

CLASSES = 10


class Block(nn.Module):
    """A bottleneck of ResNeXt: grouped convolution between two of 1 x 1, and a way around them."""

    def __init__(self, channels: int, *, groups: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.GroupNorm(8, channels),
        )

    def forward(self, value: Tensor) -> Tensor:
        return functional.relu(value + self.path(value))


def resnext(*, layers: int = 8, channels: int = 128, samples: int = 8) -> Task:
    """Blocks of one width on images of 32 x 32: patches of 2 x 2 before the first, pooling behind the last.

    Both cost next to nothing beside a block. With the default sizes a micro-batch is 1 MiB wherever the model is cut.
    """

    def made() -> list[nn.Module]:
        stem = nn.Conv2d(3, channels, 2, stride=2, bias=False)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
        blocks = [Block(channels, groups=channels // 4) for _ in range(layers)]
        return [nn.Sequential(stem, blocks[0]), *blocks[1:-1], nn.Sequential(blocks[-1], head)]

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, 32, 32), torch.randint(CLASSES, (count,))

    return Task(layers=made, microbatch=data, samples=samples, loss_fn=functional.cross_entropy)


TASKS = {"transformer": transformer(), "resnext": resnext()}
SMALL = {  # for quick forms
    "transformer": transformer(width=64, tokens=64, samples=2),
    "resnext": resnext(channels=32, samples=2),
}


# Layers that sleep


class _Input(torch.autograd.Function):
    """The way of the input: sleeps in the forward, and in the backward for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class _Weight(torch.autograd.Function):
    """The way of the weight: sleeps in the backward for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None


class Paced(nn.Module):
    """A layer of one weight that sleeps instead of computing: a backward takes half its time for each gradient.

    The model's first layer has no gradient of its input to wait for, and takes all of it for the weight's.
    """

    def __init__(self, *, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, value: Tensor) -> Tensor:
        half = self.backward_seconds / 2
        moved: Tensor = _Input.apply(value, self.forward_seconds, half)  # type: ignore[no-untyped-call]
        of_weight = half if value.requires_grad else 2 * half
        result: Tensor = moved + _Weight.apply(self.weight, of_weight)  # type: ignore[no-untyped-call]
        return result


# Layers that compute, and sleep for the rest of a fixed time


class _Backward(torch.autograd.Function):
    """Where a layer's backward ends: sleeps until its time is over. The weight lets it run in a first layer too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Steady) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        _sleep_until(ctx.layer.begun + ctx.layer.backward_seconds)
        return gradient, torch.zeros_like(*ctx.saved_tensors), None


class _Begun(torch.autograd.Function):
    """Where a layer's backward begins."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: Steady) -> Tensor:
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.begun = time.monotonic()
        return gradient, None


class Steady(nn.Module):
    """A layer whose passes take the same time however fast its core happens to be: it computes, and then sleeps."""

    def __init__(self, layer: nn.Module, *, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = layer
        self.forward_seconds, self.backward_seconds = forward, backward
        self.weight = nn.Parameter(torch.zeros(1))  # has a gradient of zero
        self.begun = 0.0  # when the backward that runs now began

    def forward(self, value: Tensor) -> Tensor:
        begun = time.monotonic()
        result: Tensor = self.layer(_Backward.apply(value, self.weight, self))  # type: ignore[no-untyped-call]
        _sleep_until(begun + self.forward_seconds)
        marked: Tensor = _Begun.apply(result, self)  # type: ignore[no-untyped-call]
        return marked


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))

"""The tasks of throughput benchmarks: models of layers that take about equal time, so that any cut is even.

No dropout and no batch statistics: all contenders compute the same, and their first updates can be compared.
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
    """A model, the data of a mini-batch and a loss; the same on every rank and in every call."""

    layers: Callable[[], list[nn.Module]]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]  # of this many samples
    samples: int  # of a micro-batch
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Sequential:
        """The whole model, at its initial weights."""
        torch.manual_seed(0)
        return nn.Sequential(*self.layers())

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one mini-batch."""
        torch.manual_seed(1)
        return self.make_batch(self.samples * microbatches)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all contenders: with momentum, so that there is something to predict from."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


# Transformer


def transformer(*, layers: int = 8, width: int = 256, tokens: int = 128, samples: int = 4) -> Task:
    """Encoder layers and nothing else: a regression from vectors to vectors."""

    def blocks() -> list[nn.Module]:
        return [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)]

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, tokens, width), torch.randn(count, tokens, width)

    return Task(layers=blocks, make_batch=data, samples=samples, loss_fn=functional.mse_loss)


# ResNeXt

CLASSES = 10


class Block(nn.Module):
    """A bottleneck of ResNeXt: a grouped convolution between two of 1 x 1, and a skip connection."""

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
    """Blocks of one width on images of 32 x 32: patches of 2 x 2 before the first block, pooling after the last.

    Both cost little beside a block. With the default sizes a micro-batch is 1 MiB wherever the model is cut.
    """

    def blocks() -> list[nn.Module]:
        stem = nn.Conv2d(3, channels, 2, stride=2, bias=False)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
        middle = [Block(channels, groups=channels // 4) for _ in range(layers)]
        return [nn.Sequential(stem, middle[0]), *middle[1:-1], nn.Sequential(middle[-1], head)]

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, 32, 32), torch.randint(CLASSES, (count,))

    return Task(layers=blocks, make_batch=data, samples=samples, loss_fn=functional.cross_entropy)


TASKS = {"transformer": transformer(), "resnext": resnext()}
SMALL_TASKS = {  # for quick forms
    "transformer": transformer(width=64, tokens=64, samples=2),
    "resnext": resnext(channels=32, samples=2),
}


# Layers that sleep


class _InputPath(torch.autograd.Function):
    """Sleeps in the forward, and in the backward for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class _WeightPath(torch.autograd.Function):
    """Sleeps in the backward for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None


class PacedLayer(nn.Module):
    """A layer of one weight that sleeps instead of computing; half of the backward's time is for each gradient.

    The model's first layer has no gradient of its input: all of the time is for the weight's.
    """

    def __init__(self, *, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, value: Tensor) -> Tensor:
        half = self.backward_seconds / 2
        output: Tensor = _InputPath.apply(value, self.forward_seconds, half)  # type: ignore[no-untyped-call]
        of_weight = half if value.requires_grad else 2 * half
        result: Tensor = output + _WeightPath.apply(self.weight, of_weight)  # type: ignore[no-untyped-call]
        return result


# Layers that compute, and sleep for the rest of a fixed time


class _BackwardEnd(torch.autograd.Function):
    """The end of a layer's backward: sleeps for the rest of its time. The weight makes it run in a first layer too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: SteadyLayer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        _sleep_until(ctx.layer.begun + ctx.layer.backward_seconds)
        return gradient, torch.zeros_like(*ctx.saved_tensors), None


class _BackwardBegin(torch.autograd.Function):
    """Where the backward of a layer begins: notes the time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: SteadyLayer) -> Tensor:
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.begun = time.monotonic()
        return gradient, None


class SteadyLayer(nn.Module):
    """A layer whose passes take a fixed time, however fast the core is: it computes, then sleeps."""

    def __init__(self, layer: nn.Module, *, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = layer
        self.forward_seconds, self.backward_seconds = forward, backward
        self.weight = nn.Parameter(torch.zeros(1))  # has a gradient of zero
        self.begun = 0.0  # when the current backward began

    def forward(self, value: Tensor) -> Tensor:
        begun = time.monotonic()
        result: Tensor = self.layer(_BackwardEnd.apply(value, self.weight, self))  # type: ignore[no-untyped-call]
        _sleep_until(begun + self.forward_seconds)
        marked: Tensor = _BackwardBegin.apply(result, self)  # type: ignore[no-untyped-call]
        return marked


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))

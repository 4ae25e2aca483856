"""Chunks of one layer each, every layer of another size, so that the size of a tensor tells its chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft

WIDTHS = [7, 11, 13, 17, 19, 23, 29, 31, 37]  # of up to eight chunks
ROWS = 40
STEPS = 8


def mark(update: int) -> float:
    return (1 + update) / 256


def model_of(chunks: int) -> nn.Sequential:
    layers = [nn.Linear(WIDTHS[k], WIDTHS[k + 1], bias=False) for k in range(chunks)]
    for layer in layers:
        nn.init.constant_(layer.weight, mark(0))
    return nn.Sequential(*layers)


def nbytes(chunk: int) -> int:
    """Of the weights of a chunk, one version."""
    return 4 * WIDTHS[chunk] * WIDTHS[chunk + 1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def pipeline(
    schedule: str,
    *,
    stages: int = 2,
    microbatches: int = 4,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = momentum,
    **options: Any,
) -> weft.Pipeline:
    chunks = stages * (2 if schedule in ("interleaved", "wpipe") else 1)
    kind = {key: options.pop(key) for key in ("vertical_sync", "warmup", "fresh") if key in options}
    return weft.Pipeline(
        model_of(chunks),
        optimizer=optimizer,
        schedule=weft.schedule(schedule, stages=stages, microbatches=microbatches, **kind),
        stages=None if dist.is_initialized() else stages,
        balance=[1] * chunks,
        **{"loss_fn": loss_fn} | options,
    )


def batch(chunks: int, *, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROWS, WIDTHS[end], generator=generator) for end in (0, chunks))


def total(report: weft.Report, category: str, *, peak: bool = False) -> list[int]:
    """By rank."""
    return [rank["peak_bytes" if peak else "bytes"][category] for rank in report.ranks]

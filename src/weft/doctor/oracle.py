"""What each method must compute, in plain PyTorch: no pipeline, no schedule, one device.

Chunk `k` passes micro-batch `j` of mini-batch `t` at the weights after `t - delay` updates, predicted `ahead` updates
beyond them; its backward reads the same, or the newest weights, predicted `backward` updates ahead. The mean gradient
of all micro-batches makes the next version, by SGD with momentum. A prediction moves along the momentum. With a
`dtype`, passes read weights and inputs rounded to it, and gradients are added up in that of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.schedule import find_block

LR, MOMENTUM = 0.3, 0.9  # so fast that a wrong delay shows within a few updates


class Reads(NamedTuple):
    """The delay of a forward's weights, the updates predicted beyond it, and those of the backward (None: the same)."""

    delay: int
    ahead: int = 0
    backward: int | None = None


Law: TypeAlias = Callable[[int, int], Reads]  # chunk k, micro-batch j


def laws(stages: int, microbatches: int) -> dict[str, Law]:
    """The formula of each method for `n` stages and `m` micro-batches; `weave` without slack."""
    n, m = stages, microbatches

    def late(k: int, j: int) -> int:
        return max(0, math.ceil((n - 1 - k - j) / m))

    def xpipe(k: int, j: int) -> Reads:
        return Reads(late(k, 0), _half_up((n + m - k / 2 - 2) / m), _half_up((m + k // 2 - 1) / m))

    block = find_block(n, 0, True)

    return {
        **dict.fromkeys(("gpipe", "1f1b", "interleaved", "zb-h1"), lambda k, j: Reads(0)),
        "pipedream": lambda k, j: Reads(late(k, j)),
        "2bw": lambda k, j: Reads(1),
        "wpipe": lambda k, j: Reads(1 if k < n else 0),
        "paci": lambda k, j: Reads(late(k, j), 0, 0),
        "weave": lambda k, j: Reads(max(0, math.ceil((block.chunk(k).in_flight - 1 - j) / m))),
        "xpipe": xpipe,
        "spectrain": lambda k, j: Reads(late(k, j), k // 2 + n - k - 1, k // 2),
        "pipeoptim": lambda k, j: Reads(late(k, j), n - k - 1, 0),
    }


def train(
    model: nn.Sequential,
    batches: Iterable[tuple[Tensor, Tensor]],
    law: Law,
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    microbatches: int,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The weights after one update a mini-batch; layer `k` of the model is chunk `k`."""
    names = [name for name, _ in model.named_parameters()]
    chunks = [int(name.partition(".")[0]) for name in names]
    versions = [[parameter.detach().clone() for parameter in model.parameters()]]
    momenta = [[torch.zeros_like(weight) for weight in versions[0]]]

    def weight(version: int, ahead: int, index: int) -> Tensor:
        return torch.add(versions[version][index], momenta[version][index], alpha=-LR * ahead)

    for t, (inputs, targets) in enumerate(batches):
        sums = [torch.zeros_like(weight) for weight in versions[0]]
        for j, (x, y) in enumerate(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)):
            reads = [law(chunk, j) for chunk in chunks]
            leaves = [
                weight(max(0, t - read.delay), read.ahead, index).to(dtype or x.dtype).requires_grad_()
                for index, read in enumerate(reads)
            ]
            output = functional_call(model, dict(zip(names, leaves, strict=True)), (x.to(dtype or x.dtype),))
            loss = loss_fn(output.to(y.dtype), y) / microbatches
            for index, (leaf, read) in enumerate(zip(leaves, reads, strict=True)):
                if read.backward is not None:
                    leaf.data.copy_(weight(t, read.backward, index))  # behind autograd's back
            sums = [total + grad for total, grad in zip(sums, torch.autograd.grad(loss, leaves), strict=True)]
        momenta.append([MOMENTUM * old + total for old, total in zip(momenta[-1], sums, strict=True)])
        versions.append([torch.add(old, move, alpha=-LR) for old, move in zip(versions[-1], momenta[-1], strict=True)])
    return dict(zip(names, versions[-1], strict=True))


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)

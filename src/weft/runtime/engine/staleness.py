"""How stale the weights of a mini-batch were, measured now and then.

The gradient of mini-batch `t` is applied to the weights `W_t`. A sample takes down the weights that its first forward
reads (predicted ones, where it predicts) and the version that they come from, and when the update is made, how far
both are from the weights that it meets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEPT = 4096  # samples of a chunk, the last ones


class _Taken(NamedTuple):
    read: list[Tensor]
    stale: list[Tensor]


class Staleness:
    """The samples of one chunk, every `every` mini-batches; 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._taken: dict[int, _Taken] = {}

    def due(self, minibatch: int) -> bool:
        return self.every > 0 and minibatch % self.every == 0

    @property
    def nbytes(self) -> int:
        taken = {id(tensor): tensor for both in self._taken.values() for some in both for tensor in some}
        return sum(tensor.nbytes for tensor in taken.values())

    @torch.no_grad()
    def take(self, minibatch: int, read: Sequence[Tensor], stale: Sequence[Tensor]) -> None:
        """The weights that a mini-batch's first forward reads, of all parameters of the chunk, and their version."""
        copies = [one.clone() for one in read]
        others = copies if read is stale else [one.clone() for one in stale]
        self._taken[minibatch] = _Taken(copies, others)

    @torch.no_grad()
    def met(self, minibatch: int, live: Sequence[Tensor]) -> None:
        """The weights that its update is about to be applied to."""
        taken = self._taken.pop(minibatch, None)
        if taken is not None:
            sample = {"minibatch": minibatch, "predicted": distance(taken.read, live)}
            same = taken.stale is taken.read
            self.samples.append(sample | {"stale": sample["predicted"] if same else distance(taken.stale, live)})


def distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of all differences together."""
    pairs = zip(ones, others, strict=True)
    return math.hypot(*[float(torch.linalg.vector_norm((one - other).abs().float())) for one, other in pairs])

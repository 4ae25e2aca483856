"""How stale the weights of a mini-batch were, measured every few mini-batches.

The gradient of mini-batch `t` is applied to the weights `W_t`. A sample copies the weights that the first forward reads
(predicted weights, if it predicts) and the version that they come from. At the update, it measures the distance of both
to the weights that the gradient is applied to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.runtime.device import HostCopy
from weft.runtime.tensors import as_real, by_kind, copies_of

MAX_SAMPLES = 4096  # of a chunk; older ones are dropped


class _Copies(NamedTuple):
    read: list[Tensor]
    stale: list[Tensor]


class Staleness:
    """The samples of one chunk, one every `every` mini-batches; 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._measured: deque[tuple[int, HostCopy]] = deque(maxlen=MAX_SAMPLES)
        self._copies: dict[int, _Copies] = {}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Those that the host knows; on a device, the newest may not be there yet."""
        return [
            {"minibatch": minibatch} | dict(zip(("predicted", "stale"), distances.numbers(), strict=True))
            for minibatch, distances in self._measured
            if distances.ready
        ]

    def due(self, minibatch: int) -> bool:
        return self.every > 0 and minibatch % self.every == 0

    @property
    def nbytes(self) -> int:
        copies = self._copies.values()
        distinct = {id(tensor): tensor for copy in copies for tensor in (*copy.read, *copy.stale)}
        return sum(tensor.nbytes for tensor in distinct.values())

    @torch.no_grad()
    def sample(self, minibatch: int, read: Sequence[Tensor], stale: Sequence[Tensor]) -> None:
        """Copy the weights that a mini-batch's first forward reads, and the version that they come from."""
        read_copies = copies_of(read)
        self._copies[minibatch] = _Copies(read_copies, read_copies if read is stale else copies_of(stale))

    @torch.no_grad()
    def measure(self, minibatch: int, live: Sequence[Tensor]) -> None:
        """Compare with the weights that the update is about to be applied to, if the mini-batch was sampled."""
        copies = self._copies.pop(minibatch, None)
        if copies is not None:
            predicted = distance(copies.read, live)
            stale = predicted if copies.stale is copies.read else distance(copies.stale, live)
            self._measured.append((minibatch, HostCopy([predicted, stale])))


def distance(copies: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The norm of the difference of two lists of tensors, one number on their device; overwrites the copies."""
    norms: list[Tensor] = []
    for kept, now in by_kind(copies, weights):
        torch._foreach_sub_(kept, now)
        norms += torch._foreach_norm([as_real(difference).float() for difference in kept])
    # sorted: the order of kinds differs between devices
    return torch.linalg.vector_norm(torch.stack(norms).sort().values) if norms else torch.zeros(())

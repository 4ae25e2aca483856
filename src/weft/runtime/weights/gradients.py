"""Where the gradients of a mini-batch are added up, micro-batch by micro-batch.

`LeafGradients`: autograd adds them up itself, in the leaves that the forwards read.

`WideGradients`: leaves are of a dtype that is too narrow for a sum, so each gradient is taken from its leaf as soon as
autograd has it, and added to a sum in fp32. Small ones are added together, which takes fewer calls; so
no more narrow gradients are held than one of a large parameter, or a batch of small ones.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.runtime.tensors import CPU_BATCH, DEVICE_BATCH, by_kind
from weft.runtime.update import tensor_bytes
from weft.runtime.weights.versions import Leaves

Gradients: TypeAlias = "list[Tensor | None]"

PIECE = 1 << 16  # elements of a large CPU tensor that are converted at once, so that they stay in the cache


class LeafGradients:
    """The sums are in the leaves that the forward of the last backward read."""

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves

    def watch(self, leaves: Leaves) -> None:
        """A pass is about to read these leaves."""

    def collect(self, leaves: Leaves) -> None:
        """The next backward leaves its gradients in these leaves."""
        if leaves is not self.leaves:
            for leaf, other in zip(leaves, self.leaves, strict=True):
                leaf.grad, other.grad = other.grad, None
            self.leaves = leaves

    def add(self) -> None:
        """Add up what the last backward left."""

    def take(self) -> Gradients:
        """The sums, which now belong to the caller."""
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return gradients

    @property
    def nbytes(self) -> int:
        return sum(gradient_bytes(leaf.grad) for leaf in self.leaves)


class WideGradients(LeafGradients):
    """The sums are fp32 tensors; leaves are of another dtype.

    Leaves hold it by their hooks, so it holds none of them: such a cycle would keep their memory for some time.
    """

    def __init__(self, leaves: Leaves) -> None:
        super().__init__([])
        self._watched: set[int] = set()  # by id: lists of leaves live as long as their set
        self._sums: Gradients = [None] * len(leaves)
        self._waiting: dict[int, Tensor] = {}  # gradients that are not added yet, by parameter
        self._size = 0  # elements of those

    def watch(self, leaves: Leaves) -> None:
        if id(leaves) in self._watched:
            return
        self._watched.add(id(leaves))
        for index, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(partial(self._take_from, index))  # type: ignore[no-untyped-call]

    def collect(self, leaves: Leaves) -> None:
        """Every leaf that is watched hands over its gradients by itself."""

    def take(self) -> Gradients:
        self.add()
        gradients, self._sums = self._sums, [None] * len(self._sums)
        return gradients

    @property
    def nbytes(self) -> int:
        return sum(map(gradient_bytes, (*self._sums, *self._waiting.values())))

    def _take_from(self, index: int, leaf: Parameter) -> None:
        gradient = leaf.grad
        assert gradient is not None
        leaf.grad = None
        if index in self._waiting:  # a layer that runs a backward of its own may leave several
            self.add()
        self._waiting[index] = gradient
        self._size += gradient.numel()
        if self._size > (CPU_BATCH if gradient.is_cpu else DEVICE_BATCH):
            self.add()

    @torch.no_grad()
    def add(self) -> None:
        waiting, self._waiting, self._size = self._waiting, {}, 0
        sums, gradients = [], []
        for index, gradient in waiting.items():
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient.float()
            elif gradient.is_sparse or total.is_sparse:
                self._sums[index] = total + gradient.float()
            elif gradient.is_cpu and gradient.numel() > PIECE and gradient.is_contiguous() and total.is_contiguous():
                _add_in_pieces(total, gradient)
            else:
                sums.append(total)
                gradients.append(gradient)
        for totals, added in by_kind(sums, gradients):
            torch._foreach_add_(totals, added)


def _add_in_pieces(total: Tensor, gradient: Tensor) -> None:
    """On a CPU, a sum of two dtypes converts one of them first, into memory as large as the tensor."""
    for part, added in zip(torch.split(total.view(-1), PIECE), torch.split(gradient.view(-1), PIECE), strict=True):
        part.add_(added)


def gradient_bytes(gradient: Tensor | None) -> int:
    return 0 if gradient is None else tensor_bytes(gradient)

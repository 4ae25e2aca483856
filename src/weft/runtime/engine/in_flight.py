"""What a micro-batch holds between its forward and its backward in a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.runtime.engine.held_bytes import ByteCount
from weft.runtime.engine.split_backward import SplitBackward
from weft.runtime.partition import Place
from weft.runtime.tree import Skeleton, flatten, unflatten
from weft.runtime.weights import Leaves

Shapes: TypeAlias = "tuple[tuple[torch.Size, torch.dtype, bool], ...]"  # of all inputs of a chunk


@dataclass(slots=True, kw_only=True)
class KeptInputs:
    """The inputs of a segment of a chunk, for its recompute."""

    tensors: list[Tensor]
    skeleton: Skeleton
    versions: list[int]  # of the tensors
    wanted: list[Tensor] = field(default_factory=list)  # those whose gradients the segment before needs
    gradients: Sequence[Tensor | None] = ()  # of these
    buffers: dict[Place, Tensor] = field(default_factory=dict)  # that the forward changed, as it found them

    @classmethod
    def of_chunk(cls, value: Any) -> KeptInputs:
        """The inputs of the first segment: leaves, which get their gradients themselves."""
        tensors, skeleton = flatten(value)
        return cls(tensors=tensors, skeleton=skeleton, versions=[tensor._version for tensor in tensors])

    @classmethod
    def between(cls, value: Any) -> KeptInputs:
        """The output of a segment, cut off from its graph; a tensor that occurs twice stays one tensor."""
        kept = cls.of_chunk(value)
        cut = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept.tensors}
        kept.tensors = [cut[id(tensor)] for tensor in kept.tensors]
        kept.wanted = [tensor for tensor in cut.values() if tensor.requires_grad]
        kept.gradients = [None] * len(kept.wanted)
        return kept

    def enter(self) -> Any:
        """The inputs, in a new graph."""
        if not self.wanted:
            return unflatten(self.skeleton, self.tensors)
        entered = _SegmentInputs.apply(self, *self.wanted)  # type: ignore[no-untyped-call]
        inside = dict(zip(map(id, self.wanted), entered, strict=True))
        return unflatten(self.skeleton, [inside.get(id(tensor), tensor) for tensor in self.tensors])

    @property
    def share_memory(self) -> bool:
        """Whether a write to one of them may change another one."""
        tensors = {id(tensor): tensor for tensor in self.tensors if tensor.numel()}.values()
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)

    @property
    def changed(self) -> bool:
        """Whether something has written to them since."""
        return self.versions != [tensor._version for tensor in self.tensors]


class _SegmentInputs(torch.autograd.Function):
    """The beginning of a segment's graph. It keeps the gradients of the inputs just as they arrive.

    A leaf of autograd would get its gradient in another layout, and autocast would cast it once for all its uses.
    """

    @staticmethod
    def forward(ctx: Any, kept: KeptInputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.kept.gradients = gradients
        return (None,) * (len(gradients) + 1)


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A micro-batch between its forward and its backward."""

    minibatch: int
    microbatch: int  # its number within the mini-batch, over all replicas
    target: Any
    given: Any  # what the forward is given
    weights: list[Leaves] = field(default_factory=list)  # that the forward reads, of each parameter set
    kept: list[KeptInputs] = field(default_factory=list)  # of the last segments of a chunk, for their recompute
    inputs: list[Tensor] = field(default_factory=list)  # leaves of the graph whose gradients the previous chunk needs
    outputs: list[Tensor] = field(default_factory=list)  # roots of the graph
    loss: float | Tensor = float("nan")
    nbytes: int = 0  # that it holds
    rebuilt: int = 0  # that it holds beyond those while its backward runs, after a recompute
    shapes: Shapes = ()
    count: ByteCount | None = None  # if it is the first micro-batch of its shapes
    split: SplitBackward | None = None

    def start_second_half(self, split: SplitBackward, nbytes: int) -> None:
        """Keep nothing but what the second half of a backward needs, and its bytes."""
        self.split, self.nbytes, self.rebuilt = split, nbytes, 0
        self.inputs, self.outputs, self.kept = [], [], []
        self.target = self.count = None

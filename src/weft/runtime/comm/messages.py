"""What one chunk hands to another: a nest of tensors, for one action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.runtime.tree import Skeleton, flatten, unflatten
from weft.schedule import Op, Step

Key: TypeAlias = "tuple[int, int, int]"  # pass (F or B), chunk that takes it, micro-batch

NO_LOSS = float("nan")


@dataclass(slots=True)
class Message:
    """An activation on its way forward, or its gradient on its way back."""

    key: Key
    tensors: list[Tensor]
    skeleton: Skeleton
    grads: Sequence[bool]  # for each tensor: whether a gradient is wanted in return
    loss: float = NO_LOSS  # on the way back: the micro-batch's loss, so that every rank comes to know it

    @staticmethod
    def of(key: Key, value: Any, *, grads: Sequence[bool] | None = None, loss: float = NO_LOSS) -> Message:
        tensors, skeleton = flatten(value)
        return Message(key, tensors, skeleton, [False] * len(tensors) if grads is None else grads, loss)

    def apart(self) -> Message:
        """As it would arrive by a link: what the taker does to it in place stays unknown to the sender."""
        tensors = [
            tensor.detach().contiguous() if grad else tensor.detach().clone(memory_format=torch.contiguous_format)
            for tensor, grad in zip(self.tensors, self.grads, strict=True)
        ]
        return Message(self.key, tensors, self.skeleton, self.grads, self.loss)

    def open(self) -> Any:
        """The nest, with leaves of this chunk's own autograd graph where a gradient is wanted in return."""
        tensors = [tensor.detach().requires_grad_(grad) for tensor, grad in zip(self.tensors, self.grads, strict=True)]
        return unflatten(self.skeleton, tensors)

    def __str__(self) -> str:
        return describe(self.key)


def key_of(step: Step, *, taker: int | None = None) -> Key:
    """The message that a step takes, or, with the chunk that takes it, the one that it sends."""
    forward = step.action.op == Op.F
    return int(Op.F if forward else Op.B), step.action.chunk if taker is None else taker, step.action.index


def describe(key: Key) -> str:
    kind = "forward" if key[0] == Op.F else "backward"
    return f"the {kind} of micro-batch {key[2]} for chunk {key[1]}"

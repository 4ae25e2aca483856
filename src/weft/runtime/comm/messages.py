"""A message from one chunk to another: a tree of tensors, for one action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.runtime.comm.device_links import Arrival
from weft.runtime.tree import Skeleton, flatten, unflatten
from weft.schedule import Op, Step

Key: TypeAlias = "tuple[int, int, int]"  # pass (F or B), receiving chunk, micro-batch

NO_LOSS = float("nan")


@dataclass(slots=True)
class Message:
    """An activation on its way forward, or its gradient on its way back."""

    key: Key
    tensors: list[Tensor]
    skeleton: Skeleton
    grads: Sequence[bool]  # for each tensor: whether the sender needs its gradient
    loss: float | Tensor = NO_LOSS  # on the way back: the micro-batch's loss, so that every rank gets it
    arrival: Arrival | None = None  # of the tensors, if they are still on their way

    @staticmethod
    def pack(key: Key, value: Any, *, grads: Sequence[bool] | None = None, loss: float | Tensor = NO_LOSS) -> Message:
        tensors, skeleton = flatten(value)
        return Message(key, tensors, skeleton, [False] * len(tensors) if grads is None else grads, loss)

    def detached_copy(self) -> Message:
        """As it would arrive over a link: the sender does not see what the receiver changes in place."""
        tensors = [
            tensor.detach().contiguous() if grad else tensor.detach().clone(memory_format=torch.contiguous_format)
            for tensor, grad in zip(self.tensors, self.grads, strict=True)
        ]
        return Message(self.key, tensors, self.skeleton, self.grads, self.loss)

    def unpack(self) -> Any:
        """The tree; tensors whose gradient the sender needs are leaves of the receiver's autograd graph.

        The current stream waits for their arrival.
        """
        if self.arrival is not None:
            self.arrival.wait()
        tensors = [tensor.detach().requires_grad_(grad) for tensor, grad in zip(self.tensors, self.grads, strict=True)]
        return unflatten(self.skeleton, tensors)

    def __str__(self) -> str:
        return describe_key(self.key)


def incoming_key(step: Step) -> Key:
    """The key of the message that a step receives."""
    return _pass(step), step.action.chunk, step.action.index


def outgoing_key(step: Step) -> Key:
    """The key of the message that a step sends."""
    return _pass(step), step.feeds, step.action.index


def _pass(step: Step) -> int:
    return int(Op.F if step.action.op == Op.F else Op.B)


def describe_key(key: Key) -> str:
    kind = "forward" if key[0] == Op.F else "backward"
    return f"the {kind} of micro-batch {key[2]} for chunk {key[1]}"

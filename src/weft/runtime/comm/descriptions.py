"""Descriptions of messages: dtypes, shapes and nesting of tensors. Each is sent once, then referred to by number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from weft.errors import one_line
from weft.runtime.comm.buffers import aligned, check_announced, damaged_message
from weft.runtime.comm.messages import Message
from weft.runtime.tree import from_json

MAX_DESCRIPTIONS = 256

# skeleton, whether the last tensor is the loss, then (dtype, shape, needs a gradient, is on the device) of each tensor
Description: TypeAlias = "tuple[Any, ...]"


class Layout(NamedTuple):
    """A description as its receiver needs it."""

    skeleton: Any
    has_loss: bool
    tensors: list[tuple[torch.dtype, tuple[int, ...], int, bool]]  # dtype, shape, bytes, whether it is on the device
    grads: tuple[bool, ...]
    nbytes: int  # of all tensors, each aligned
    device_nbytes: int  # of those on the device


class SentDescriptions:
    """Those that the receiver knows."""

    def __init__(self) -> None:
        self._numbers: dict[Description, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def describe(self, message: Message, tensors: Sequence[Tensor]) -> tuple[int, bytes]:
        """The number of a message's description, and its text if the receiver does not know it yet."""
        has_loss = len(tensors) > len(message.tensors)
        grads = (*message.grads, False) if has_loss else message.grads
        forms = [
            (tensor.dtype, tensor.shape, grad, not tensor.is_cpu) for tensor, grad in zip(tensors, grads, strict=True)
        ]
        description = (message.skeleton, has_loss, *forms)
        number = self._numbers.get(description)
        if number is not None:
            return number, b""
        if len(self._numbers) == MAX_DESCRIPTIONS:
            self._numbers.clear()
        number = self._numbers[description] = self._next % (2 * MAX_DESCRIPTIONS)
        self._next += 1
        plain = [(str(dtype).removeprefix("torch."), *others) for dtype, *others in forms]
        return number, json.dumps((message.skeleton, has_loss, *plain)).encode()


class ReceivedDescriptions:
    """Those that a rank has sent."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._layouts: dict[int, Layout] = {}

    def __len__(self) -> int:
        return len(self._layouts)

    def layout(self, number: int, text: bytes) -> Layout:
        """The description with this number, which a text, if there is one, replaces."""
        if text:
            try:
                layout = _read(text)
            except Exception as problem:
                has = f"a description that can't be read ({one_line(problem)})"
                raise damaged_message(self._source, has) from problem
            check_announced(layout.nbytes, f"rank {self._source}'s message")
            self._layouts[number] = layout
        if number not in self._layouts:
            raise damaged_message(self._source, f"description {number}, which was never sent")
        return self._layouts[number]


def _read(text: bytes) -> Layout:
    skeleton, has_loss, *parts = from_json(json.loads(text))
    tensors = []
    for name, shape, _, on_device in parts:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"no tensor has dtype {name} and shape {shape}")
        tensors.append((dtype, shape, prod(shape) * dtype.itemsize, bool(on_device)))
    if has_loss and not tensors:
        raise ValueError("a loss, and no tensor")
    sizes = [(aligned(nbytes), on_device) for *_, nbytes, on_device in tensors]
    return Layout(
        skeleton=skeleton,
        has_loss=bool(has_loss),
        tensors=tensors,
        grads=tuple(bool(grad) for _, _, grad, _ in parts),
        nbytes=sum(size for size, _ in sizes),
        device_nbytes=sum(size for size, on_device in sizes if on_device),
    )

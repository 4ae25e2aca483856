"""The memory of tensors, as files are read into it and written from it: block by block, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 8 << 20  # bytes


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU; a dimension of one element may have any stride."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def pieces_of(tensor: Tensor, itemsize: int) -> Iterator[Tensor]:
    """A tensor in pieces of at most a block, in the order of its elements; a file has `itemsize` bytes for each."""
    if tensor.numel() * itemsize <= BLOCK or tensor.dim() == 0:
        if tensor.numel():
            yield tensor
        return
    row = tensor[0].numel() * itemsize
    if row > BLOCK:
        for part in tensor:
            yield from pieces_of(part, itemsize)
    else:
        yield from torch.split(tensor, BLOCK // row)

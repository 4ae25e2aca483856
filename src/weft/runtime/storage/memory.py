"""The memory of a tensor, for files to be read into or written from."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU; a dimension of one element may have any stride."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")

"""Build a model without its weights: tensors that are only allocated go to the meta device, computed ones stay real.

`torch.device("meta")` loses everything, also the buffers that a constructor computes. Parameters of PyTorch's layers
are allocated first (`torch.empty`) and initialized afterwards; buffers such as masks and frequencies come from
`arange`, `ones` or `tensor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ALLOCATIONS = (torch.empty, torch.empty_strided, torch.empty_permuted)


class _AllocateOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in ALLOCATIONS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build a model in this block, and its weights take no memory: a pipeline makes them where they are needed.

    Buffers keep the values that constructors compute.
    """
    with _AllocateOnMeta():
        yield

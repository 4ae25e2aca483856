"""Build a model without its weights: tensors that are only allocated go to the meta device, computed ones stay real.

`torch.device("meta")` loses everything, also the buffers that a constructor computes. Parameters of PyTorch's layers
are allocated first (`torch.empty`) and initialized afterwards; buffers such as masks and frequencies come from
`arange`, `ones` or `tensor`.

A write to a tensor on the meta device is lost, unless a rule of its module repeats it later. So the last write to each
tensor is noted: which rule made it or, if none did, where.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.runtime.initial.seeded import written_tensors

ALLOCATIONS = (torch.empty, torch.empty_strided, torch.empty_permuted)
RESETS = ("reset_parameters", "_reset_parameters")
RULE = "_init_weights"  # of a model, for each of its modules; it takes one
TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class LastWrite(NamedTuple):
    """Who wrote to a tensor on the meta device last."""

    module: weakref.ref[nn.Module] | None  # whose `reset_parameters` it was
    lost: str  # file and line of a write that no rule repeats; else empty


class _AllocateOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in ALLOCATIONS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _NoteWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_tensors(func, args):
            if tensor.is_meta:
                storage: Any = tensor.untyped_storage()  # views and `.data` have the same one
                storage.weft_last_write = _last_write()
        return func(*args, **(kwargs or {}))


def _last_write() -> LastWrite:
    """From the calls that have led to a write."""
    frame, place = sys._getframe(2), ""
    while frame is not None:
        name, code = frame.f_code.co_name, frame.f_code
        if name in RESETS and isinstance(module := frame.f_locals.get("self"), nn.Module):
            return LastWrite(weakref.ref(module), "")
        if name == RULE and code.co_argcount == 2:
            return LastWrite(None, "")
        if not place and not code.co_filename.startswith((TORCH, __file__, "<")):
            place = f"{os.path.basename(code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return LastWrite(None, place)


def last_write(tensor: Tensor) -> LastWrite:
    """Who wrote to a tensor on the meta device last, if it was built in `on_meta`."""
    return getattr(tensor.untyped_storage(), "weft_last_write", LastWrite(None, ""))


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build a model in this block, and its weights take no memory: a pipeline makes them where they are needed.

    Buffers keep the values that constructors compute.
    """
    with _AllocateOnMeta(), _NoteWrites():  # type: ignore[no-untyped-call]
        yield

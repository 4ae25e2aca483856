"""What profilers and allocators of a device show: named ranges, and the memory that it has taken."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _ranges(device: torch.device) -> Any:
    """The module for named ranges, such as NVTX of CUDA; None where a device has none."""
    return getattr(torch.get_device_module(device), "nvtx", None)


def push_range(device: torch.device, name: str) -> None:
    """Begin a range in a profiler's picture."""
    if (ranges := _ranges(device)) is not None:
        ranges.range_push(name)


def pop_range(device: torch.device) -> None:
    """End the range that was begun last."""
    if (ranges := _ranges(device)) is not None:
        ranges.range_pop()


def allocator_peaks(device: torch.device) -> dict[str, int]:
    """The most bytes that tensors have taken on a device, and that its allocator has reserved; empty if unknown."""
    try:
        return {
            "allocated": torch.accelerator.max_memory_allocated(device),
            "reserved": torch.accelerator.max_memory_reserved(device),
        }
    except (RuntimeError, NotImplementedError, ValueError):
        return {}

"""Reusable memory for messages.

Activations are views of the buffer that they arrived in, for as long as anything references one: autograd, the model,
or a user. So a buffer is free when its array has no other owner, by Python's own reference count.
"""

from __future__ import annotations

import functools
import os
import sys

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.errors import RunError

DAMAGED = "it is damaged, or the ranks run different versions of weft"
ALIGNMENT = 64  # as torch's own allocations: for others, kernels may choose another order of additions
_PROBE = [np.empty(0)]
_FREE_REFERENCES = sys.getrefcount(_PROBE[0])  # of an array that only a list references; see is_held


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check_announced(size: int, what: str, *, least: int = 0) -> None:
    """Refuse a size that another rank has announced, before memory is allocated, if this machine can't hold it."""
    if not least <= size <= _physical_memory():
        limits = f"it may have {least} to {_physical_memory()}, the memory of this machine"
        raise RunError(f"{what} has {size} bytes ({limits}); {DAMAGED}")


def damaged_message(source: int, has: str) -> RunError:
    """What to raise for a message that says the impossible."""
    return RunError(f"rank {source}'s message has {has}; {DAMAGED}")


@functools.cache
def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # this system does not say
        return sys.maxsize


def is_held(arrays: list[npt.NDArray[np.uint8]], index: int) -> bool:
    """Whether anything besides this list references an array in it, or a view of that array."""
    return sys.getrefcount(arrays[index]) != _FREE_REFERENCES


class Pool:
    """Flat byte tensors on the CPU."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def acquire(self, size: int) -> Tensor:
        """A tensor of `size` bytes that nothing else references; it is free again when all its views are gone."""
        free = self._free()
        large = [index for index in free if self._arrays[index].nbytes >= size]
        if large:
            chosen = min(large, key=lambda index: self._arrays[index].nbytes)
        else:
            for index in free[:1]:  # replace a buffer that has become too small
                del self._arrays[index]
            chosen = len(self._arrays)
            self._arrays.append(_aligned_array(aligned(size)))
        return torch.from_numpy(self._arrays[chosen])[:size]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def free_bytes(self) -> int:
        return sum(self._arrays[index].nbytes for index in self._free())

    def _free(self) -> list[int]:
        return [index for index in range(len(self._arrays)) if not is_held(self._arrays, index)]


def _aligned_array(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]

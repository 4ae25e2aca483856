"""Memory for messages, used again and again.

Activations are views of the buffer they arrived in, for as long as anything holds on to one: autograd, the model,
or a user. So a buffer is free when its array has no other owner, which Python's own count of references tells.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 64  # as torch's own allocations: kernels may choose another order of additions for others
_PROBE = [np.empty(0)]
_UNUSED = sys.getrefcount(_PROBE[0])  # references to what only a list holds, asked for in this very way


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_held(arrays: list[npt.NDArray[np.uint8]], place: int) -> bool:
    """Whether anything but this list has an array of it, or a view."""
    return sys.getrefcount(arrays[place]) != _UNUSED


class Pool:
    """Flat byte tensors on the CPU."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def take(self, size: int) -> Tensor:
        """A tensor of `size` bytes that nobody else holds; it is free again when all its views are gone."""
        unused = [place for place in range(len(self._arrays)) if not is_held(self._arrays, place)]
        large = [place for place in unused if self._arrays[place].nbytes >= size]
        if large:
            chosen = min(large, key=lambda place: self._arrays[place].nbytes)
        else:
            for place in unused[:1]:  # too small for what messages have become
                del self._arrays[place]
            chosen = len(self._arrays)
            self._arrays.append(_array(aligned(size)))
        return torch.from_numpy(self._arrays[chosen])[:size]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @property
    def unused_bytes(self) -> int:
        """Of buffers that nothing holds at the moment."""
        arrays = self._arrays
        return sum(arrays[at].nbytes for at in range(len(arrays)) if not is_held(arrays, at))


def _array(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]

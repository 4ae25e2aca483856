"""What every source of weights can do: say what it has, and read one tensor into memory that is there already."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from weft.runtime.storage.safetensors_header import Form


class TensorSource(Protocol):
    """Tensors by name, such as those of a file, which are read one at a time."""

    def names(self) -> Collection[str]: ...

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        ...

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape, of any dtype and on any device."""
        ...

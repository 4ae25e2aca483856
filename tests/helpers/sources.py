"""Sources of tensors for tests: one in memory, and all tensors of any other."""

from __future__ import annotations

from collections.abc import KeysView, Mapping

import torch
from torch import Tensor

from weft.runtime.storage import Form, TensorSource


class InMemory:
    """The tensors of a dict as a `TensorSource`; `read` lists the names that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.read: list[str] = []

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def form(self, name: str) -> Form:
        return self._tensors[name].dtype, tuple(self._tensors[name].shape)

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor) -> None:
        self.read.append(name)
        tensor.copy_(self._tensors[name])


def read_all(source: TensorSource) -> dict[str, Tensor]:
    """All tensors of a source."""
    read = {name: torch.empty(source.form(name)[1], dtype=source.form(name)[0]) for name in source.names()}
    for name, tensor in read.items():
        source.read_into(name, tensor)
    return read

"""Tensors in memory as a source of weights, such as the `state_dict` of another model."""

from __future__ import annotations

from collections.abc import KeysView, Mapping

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.storage.safetensors_header import Form


class TensorMapping:
    """A `TensorSource` of tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        if wrong := [key for key in tensors if not isinstance(key, str)]:
            raise WeftError(f"{self} must have names as keys (got {wrong[0]!r}); give it the state_dict of a model")

    def __str__(self) -> str:
        return f"weights= (a {type(self._tensors).__name__})"

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            got = "a tensor on the meta device" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise WeftError(f"{self} must hold tensors with values ({name}: {got}); give it the state_dict of a model")
        return tensor.dtype, tuple(tensor.shape)

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into one of the same shape, of any dtype and on any device."""
        tensor.copy_(self._tensors[name])

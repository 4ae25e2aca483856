"""A backward that reads other weights than its forward: autograd saves weights by reference to a parameter.

A tensor that shares its storage with a weight (the weight itself, its transpose, a slice) is saved as "this view of
parameter x" and resolved in the weights that the backward reads. So nothing holds the forward's weights: they may be
overwritten while a micro-batch is in flight. A tensor that a layer computes from a weight (a cast, a norm) is an
activation like any other, and stays that of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.errors import WeftError


class _View(NamedTuple):
    """A tensor over a weight's storage, without the storage."""

    place: tuple[int, int]  # parameter set, and parameter in it
    weight_stride: tuple[int, ...]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in bytes, from the start of the weight
    conj: bool


# Any other tensor, and its version: with hooks, autograd itself does not check that it is unchanged.
_Saved: TypeAlias = "tuple[Tensor, int]"


class WeightSubstitution:
    """The weights that a chunk's forward and backward read, for autograd's hooks."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[tuple[int, int], Parameter]] = {}  # by the address of the storage
        self._backward_weights: Sequence[Sequence[Parameter]] = ()

    def forward_reads(self, weights: Sequence[Sequence[Parameter]]) -> None:
        """Set the weights that the next forward reads."""
        self._places = {}
        for number, leaves in enumerate(weights):
            for index, weight in enumerate(leaves):
                address = weight.untyped_storage().data_ptr()
                if not address:  # a weight without elements
                    continue
                if address in self._places:
                    raise WeftError(
                        "two parameters share one storage, so their saved tensors can't be distinguished; clone them"
                    )
                self._places[address] = (number, index), weight

    def backward_reads(self, weights: Sequence[Sequence[Parameter]]) -> None:
        """Set the weights that the next backward reads."""
        self._backward_weights = weights

    def hooks(self, held: Callable[[Tensor], Tensor] = Tensor.detach) -> contextlib.AbstractContextManager[Any]:
        """For use around a forward; `held` makes what the graph holds of an activation that is saved."""
        places = self._places

        def pack(tensor: Tensor) -> _View | _Saved:
            place = places.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
            if place is not None:
                if not tensor.is_neg():
                    return _view_of(tensor, *place)
                tensor = tensor.detach().clone()
            return held(tensor), tensor._version

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: _View | _Saved) -> Tensor:
        if isinstance(packed, _View):
            number, index = packed.place
            return _resolve(packed, self._backward_weights[number][index])
        tensor, version = packed
        if tensor._version != version:
            raise WeftError(
                f"a tensor of shape {tuple(tensor.shape)} was changed in place after the forward had saved it for the "
                "backward; compute a new tensor instead"
            )
        return tensor


def _view_of(tensor: Tensor, place: tuple[int, int], weight: Parameter) -> _View:
    offset = int(tensor.storage_offset()) * tensor.itemsize - int(weight.storage_offset()) * weight.itemsize
    return _View(place, weight.stride(), tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj())


def _resolve(view: _View, weight: Parameter) -> Tensor:
    """The same view of another weight."""
    if weight.stride() != view.weight_stride:
        raise WeftError(
            f"a parameter of shape {tuple(weight.shape)} is a slice of a larger tensor, so its versions have other "
            "strides; clone it"
        )
    offset = view.offset + int(weight.storage_offset()) * weight.itemsize
    tensor = torch.empty(0, dtype=view.dtype, device=weight.device)
    tensor.set_(weight.untyped_storage(), offset // view.dtype.itemsize, view.size, view.stride)
    return tensor.conj() if view.conj else tensor

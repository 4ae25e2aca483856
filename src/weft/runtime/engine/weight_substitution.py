"""A backward at other weights than its forward: what autograd saves of a weight is saved by name.

A tensor that shares its storage with a weight (the weight itself, its transpose, a part of it) is kept as "this view
of parameter x" and found again in the weights of the backward, whichever those are then. So nothing holds the
forward's weights: they may be written over while a micro-batch is in flight. What a layer computes from a weight and
saves then (a cast, a norm) is an activation like any other, and stays that of the forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.errors import WeftError


class _View(NamedTuple):
    """A tensor over a weight's storage, without the storage."""

    place: tuple[int, int]  # parameter set, and parameter in it
    strides: tuple[int, ...]  # of the weight
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int  # bytes from the weight's own
    conj: bool


class _Kept(NamedTuple):
    """Any other tensor, and how often it had been changed; hooks take it out of autograd's own check."""

    tensor: Tensor
    version: int


class WeightSubstitution:
    """The weights that a chunk's forward and backward read, for autograd's hooks."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[tuple[int, int], Parameter]] = {}  # by address of the storage
        self._reading: Sequence[Sequence[Parameter]] = ()

    def know(self, weights: Sequence[Sequence[Parameter]]) -> None:
        """The next forward reads these."""
        self._places = {}
        for number, leaves in enumerate(weights):
            for place, one in enumerate(leaves):
                address = one.untyped_storage().data_ptr()
                if not address:  # of a weight without elements
                    continue
                if address in self._places:
                    raise WeftError(
                        "two parameters are parts of one storage, so saved ones can't be told apart; clone them"
                    )
                self._places[address] = (number, place), one

    def read(self, weights: Sequence[Sequence[Parameter]]) -> None:
        """The next backward reads these."""
        self._reading = weights

    def hooks(self, saved: set[tuple[int, int]] | None = None) -> contextlib.AbstractContextManager[Any]:
        """Around a forward; notes the storages of all that is kept in `saved`."""
        places = self._places

        def pack(tensor: Tensor) -> _View | _Kept:
            if tensor.layout != torch.strided:
                return _Kept(tensor.detach(), tensor._version)
            address = tensor.untyped_storage().data_ptr()
            if address in places:
                if not tensor.is_neg():
                    return _view(tensor, *places[address])
                tensor = tensor.detach().clone()
            storage = tensor.untyped_storage()
            if saved is not None:
                saved.add((storage.data_ptr(), storage.nbytes()))
            return _Kept(tensor.detach(), tensor._version)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, kept: _View | _Kept) -> Tensor:
        if isinstance(kept, _View):
            number, place = kept.place
            return _seen(kept, self._reading[number][place])
        if kept.tensor._version != kept.version:
            raise WeftError(
                f"a tensor of shape {tuple(kept.tensor.shape)} was changed in place after the forward had saved it for "
                "the backward; let the layer make a new one"
            )
        return kept.tensor


def _view(tensor: Tensor, place: tuple[int, int], weight: Parameter) -> _View:
    start = int(tensor.storage_offset()) * tensor.itemsize - int(weight.storage_offset()) * weight.itemsize
    return _View(place, weight.stride(), tensor.dtype, tensor.shape, tensor.stride(), start, tensor.is_conj())


def _seen(view: _View, weight: Parameter) -> Tensor:
    """The same view of other weights."""
    if weight.stride() != view.strides:
        raise WeftError(
            f"a parameter of shape {tuple(weight.shape)} is a part of a larger tensor, so its versions are laid out "
            "differently; clone it"
        )
    start = view.start + int(weight.storage_offset()) * weight.itemsize
    tensor = torch.empty(0, dtype=view.dtype, device=weight.device)
    tensor.set_(weight.untyped_storage(), start // view.dtype.itemsize, view.size, view.stride)
    return tensor.conj() if view.conj else tensor

"""The bytes that a micro-batch holds, counted by storage: of the first one of some shapes, as it takes time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.runtime.partition import named_tensors


class HeldBytes(NamedTuple):
    """The bytes of micro-batches of some shapes."""

    held: int  # bytes between forward and backward
    rebuilt: int  # bytes that a recompute adds to them at its peak


class ByteCount:
    """Counts what a micro-batch holds, weights and buffers aside; of what it is given, its own part."""

    def __init__(self, layers: Iterable[nn.Module], *, given: list[Tensor], target: list[Tensor]) -> None:
        self._given = {tensor.data_ptr(): tensor.nbytes for tensor in given}
        self._target = {tensor.data_ptr(): tensor.nbytes for tensor in target}
        tensors = [tensor for layer in layers for _, _, tensor in named_tensors(layer)]
        self._weights = {_storage(tensor)[0] for tensor in tensors}  # addresses of storages, of buffers too
        self._messages = {_storage(tensor)[0] for tensor in (*given, *target)}
        self._others = self._weights | self._messages
        self._kept: dict[int, int] = {}
        self._saved: set[tuple[int, int]] = set()  # storages that autograd saves
        self._held_by_graph: list[weakref.ref[Tensor]] = []
        self._peak = 0

    @property
    def _held(self) -> int:
        return sum((self._given | self._target).values()) + sum(self._kept.values())

    def held_bytes(self, *, keeps_graph: bool) -> HeldBytes:
        peak = max(self._peak, self._held)
        return HeldBytes(peak, 0) if keeps_graph else HeldBytes(self._held, peak - self._held)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """For use around a forward: note the storages of all that autograd saves."""
        self.restart()
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)

    def restart(self) -> None:
        """From here on, count the saved tensors of another graph."""
        self._saved, self._held_by_graph = set(), []

    def note(self, tensor: Tensor) -> Tensor:
        """A tensor that autograd saves; returns what the graph should hold."""
        self._saved.add(_storage(tensor))
        held = tensor.detach()  # the tensor itself could be an output that its own graph then holds forever
        self._held_by_graph.append(weakref.ref(held))
        return held

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are held until the backward."""
        storages = dict(map(_storage, tensors))
        self._kept |= {address: nbytes for address, nbytes in storages.items() if address not in self._others}

    def add_graph(self, outputs: Iterable[Tensor]) -> None:
        """Count a graph with these outputs, beside all that is held."""
        storages = self._saved | {_storage(tensor) for tensor in outputs}
        held = self._others | self._kept.keys()
        graph = sum(nbytes for address, nbytes in storages if address not in held)
        self._peak = max(self._peak, self._held + graph)

    def held_until_weights(self, kept: Iterable[Tensor], arrived: Iterable[Tensor]) -> int:
        """Bytes between the halves of a backward: what it keeps, and what is left of the graph.

        Tensors of a message (`arrived` and what the forward was given) count by themselves, all others by storage.
        """
        messages = self._messages | {_storage(tensor)[0] for tensor in arrived}
        own: dict[int, int] = {}
        storages: dict[int, int] = {}
        left = (tensor for reference in self._held_by_graph if (tensor := reference()) is not None)
        for tensor in (*kept, *left):
            address, nbytes = _storage(tensor)
            if address in messages:
                own[tensor.data_ptr()] = max(tensor.nbytes, own.get(tensor.data_ptr(), 0))
            elif address not in self._weights:
                storages[address] = nbytes
        return sum(own.values()) + sum(storages.values())

    def drop(self) -> None:
        """Nothing that was counted is needed any more, except the target."""
        self._given, self._kept, self._peak = {}, {}, 0


class NoCount:
    """In the place of a `ByteCount`: counts nothing, and autograd saves nothing."""

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)

    def keep(self, tensors: Iterable[Tensor]) -> None: ...

    def add_graph(self, outputs: Iterable[Tensor]) -> None: ...

    def drop(self) -> None: ...


def _nothing(_: Any) -> Any:
    return None


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()

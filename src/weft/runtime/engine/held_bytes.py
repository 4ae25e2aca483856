"""The bytes that a micro-batch holds, counted by storage: of the first one of some shapes, as it takes time."""

from __future__ import annotations

import contextlib
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
        self._others = {_storage(tensor)[0] for tensor in (*tensors, *given, *target)}  # addresses of storages
        self._kept: dict[int, int] = {}
        self.saved: set[tuple[int, int]] = set()  # storages that autograd saves
        self._peak = 0

    @property
    def _held(self) -> int:
        return sum((self._given | self._target).values()) + sum(self._kept.values())

    def held_bytes(self, *, keeps_graph: bool) -> HeldBytes:
        peak = max(self._peak, self._held)
        return HeldBytes(peak, 0) if keeps_graph else HeldBytes(self._held, peak - self._held)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """For use around a forward: note the storages of all that autograd saves."""
        self.saved = set()

        def note(tensor: Tensor) -> Tensor:
            self.saved.add(_storage(tensor))
            return tensor.detach()  # the tensor itself could be an output that its own graph then holds forever

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are held until the backward."""
        storages = dict(map(_storage, tensors))
        self._kept |= {address: nbytes for address, nbytes in storages.items() if address not in self._others}

    def add_graph(self, outputs: Iterable[Tensor]) -> None:
        """Count a graph with these outputs, beside all that is held."""
        storages = self.saved | {_storage(tensor) for tensor in outputs}
        held = self._others | self._kept.keys()
        graph = sum(nbytes for address, nbytes in storages if address not in held)
        self._peak = max(self._peak, self._held + graph)

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

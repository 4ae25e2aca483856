"""Reads tensors of a safetensors file, each straight into the memory where it is needed.

A file is read, not mapped: pages of a mapped file count in the resident set of a process until somebody else needs the
memory. So nothing is held but the header and, where a dtype is converted or a device is filled, a buffer of one block.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import KeysView
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.process import status
from weft.runtime.storage.memory import memory_of, pieces_of
from weft.runtime.storage.pickles import is_pickle, refusal
from weft.runtime.storage.safetensors_header import LENGTH, Form, Place, check_byte_order, header_length, places_in


class TensorFile:
    """An open safetensors file, whose header has been checked. It raises WeftError if the file is damaged."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_byte_order()
        self.path = Path(path)
        self._handle = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        size = os.fstat(self._handle).st_size
        start = os.pread(self._handle, LENGTH, 0)
        try:
            length = header_length(start, size)
            self._places = places_in(os.pread(self._handle, length, LENGTH), size)
        except ValueError as problem:
            if is_pickle(start):
                raise WeftError(refusal(self.path)) from None
            raise WeftError(f"{self.path} is not an intact safetensors file: {problem}; use an intact copy") from None

    def names(self) -> KeysView[str]:
        return self._places.keys()

    def form(self, name: str) -> Form:
        """The dtype and shape of a tensor."""
        place = self._place(name)
        return place.dtype, place.shape

    @torch.no_grad()
    def read_into(self, name: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape, of any dtype and on any device."""
        place = self._place(name)
        self._check(name, place, tensor)
        start, buffer = place.start, torch.empty(0, dtype=torch.uint8)
        for piece in pieces_of(tensor.detach(), place.dtype.itemsize):
            size = piece.numel() * place.dtype.itemsize
            if piece.is_cpu and piece.dtype == place.dtype and piece.is_contiguous():
                self._read(start, piece)
            else:
                buffer = buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8)
                values = buffer[:size].view(place.dtype).view(piece.shape)
                self._read(start, values)
                piece.copy_(values)
            start += size
        torch.autograd.graph.increment_version(tensor)  # autograd does not see what `_read` writes

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise WeftError(f"{self.path} has no {name}; use the file of this model")
        return self._places[name]

    def _check(self, name: str, place: Place, tensor: Tensor) -> None:
        if tuple(tensor.shape) != place.shape:
            raise WeftError(
                f"{name} of {self.path} has another shape (file: {place.shape}, here: {tuple(tensor.shape)}); "
                "use the file of this model"
            )
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeftError(f"{name} of {self.path} is read into dense memory, and here it has none; materialize it")
        if place.dtype.is_complex and not tensor.is_complex():
            raise WeftError(f"{name} of {self.path} is complex, and here it is {tensor.dtype}; use a complex dtype")

    def _read(self, start: int, tensor: Tensor) -> None:
        """Fill a contiguous tensor of the CPU with the bytes of the file."""
        rest = memory_of(tensor)
        while len(rest):
            count = os.preadv(self._handle, [rest], start)
            if count == 0:
                raise WeftError(f"{self.path} became shorter while it was read; use a file that nobody changes")
            start, rest = start + count, rest[count:]
            status.nbytes += count

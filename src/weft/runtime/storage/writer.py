"""Writes files block by block: counted, hashed and fsynced on the way.

So a save shows that it moves, however large and slow it is. It needs no memory but the tensors themselves and, where
they are on a device or not contiguous, a block.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from weft import faults
from weft.errors import WeftError
from weft.runtime.process import status
from weft.runtime.storage import memory
from weft.runtime.storage.memory import memory_of, pieces_of
from weft.runtime.storage.safetensors_header import Form, check_byte_order, header_of, stored_form
from weft.runtime.tensors import as_real

SYNC_EVERY = 256 << 20  # bytes between two fsyncs, so that the last one does not take long without a sign of progress


class FileWriter:
    """A new file; `entry` is its size and SHA-256, once it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha256, self._size, self._unsynced = hashlib.sha256(), 0, 0

    def __enter__(self) -> FileWriter:
        self._file = open(self._path, "wb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            written = self._file.write(rest[: memory.BLOCK]) or 0
            self._sha256.update(rest[:written])
            rest = rest[written:]
            self._size += written
            self._unsynced += written
            status.nbytes += written
            if self._unsynced >= SYNC_EVERY:
                os.fsync(self._file.fileno())
                self._unsynced = 0
            faults.hit("chunk-write")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write dense tensors of any device, complex ones as pairs of numbers; the size and SHA-256 of the file."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise WeftError(f"safetensors files hold dense tensors, and {name} is a {tensor.layout} one; keep it dense")
    forms = {name: stored_form((tensor.dtype, tuple(tensor.shape))) for name, tensor in tensors.items()}
    return write_each(path, forms, tensors.__getitem__)


def write_each(
    path: Path, forms: Mapping[str, Form], read: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write tensors of known forms, each of which is read when its turn comes; the size and SHA-256 of the file."""
    check_byte_order()
    ordered = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))  # so that all are aligned
    with FileWriter(path) as writer:
        writer.write(header_of({name: forms[name] for name in ordered}, metadata))
        for name in ordered:
            _write_tensor(writer, read(name))  # and hold it no longer
    return writer.entry


def _write_tensor(writer: FileWriter, tensor: Tensor) -> None:
    real = as_real(tensor.detach().resolve_conj())
    for piece in pieces_of(real, real.dtype.itemsize):
        writer.write(memory_of(piece.resolve_neg().cpu().contiguous()))

"""Writes files block by block: counted, hashed and fsynced on the way.

So a save shows that it moves, however large and slow it is, and needs no memory but the tensors themselves.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from weft import faults
from weft.errors import WeftError
from weft.runtime.process import status
from weft.runtime.storage.memory import memory_of
from weft.runtime.storage.safetensors_header import DTYPES, header_of

BLOCK = 8 << 20  # bytes
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
            written = self._file.write(rest[:BLOCK]) or 0
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
    """Write contiguous tensors of the CPU; the size and SHA-256 of the file."""
    if sys.byteorder != "little":
        raise WeftError(f"checkpoints are little-endian (this machine: {sys.byteorder}-endian); save on another one")
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that all are aligned
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise WeftError(f"safetensors has no {tensor.dtype} ({name}); keep it in a dtype that it has")
    with FileWriter(path) as writer:
        writer.write(header_of({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered}))
        for _, tensor in ordered:
            writer.write(memory_of(tensor))
    return writer.entry

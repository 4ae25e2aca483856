"""Writes the files of a checkpoint block by block: counted, hashed and fsynced on the way.

So a save shows that it moves, however large and slow it is, and needs no memory but the tensors themselves. Tensors are
stored in the safetensors format: the length of a JSON header, the header, the bytes of all tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from weft import faults
from weft.errors import WeftError
from weft.runtime.process import status

BLOCK = 8 << 20  # bytes
SYNC_EVERY = 256 << 20  # bytes between two fsyncs, so that the last one does not take long without a sign of progress

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


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
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise WeftError(f"safetensors has no {tensor.dtype} ({name}); keep it in a dtype that it has")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with FileWriter(path) as writer:
        writer.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            if tensor.numel():
                writer.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return writer.entry

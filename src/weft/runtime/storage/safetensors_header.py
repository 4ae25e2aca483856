"""The header of a safetensors file: eight bytes of length, then JSON that says where each tensor is.

    {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …, "__metadata__": {"format": "pt"}}

Offsets count from the end of the header. The tensors fill the rest of the file, without a gap and without overlap.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.errors import WeftError

LENGTH = 8  # bytes before the header that hold its length
LONGEST = 100_000_000  # bytes of a header that the safetensors library reads
METADATA = "__metadata__"

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
    torch.complex64: "C64",
    torch.float8_e8m0fnu: "F8_E8M0",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Form: TypeAlias = "tuple[torch.dtype, tuple[int, ...]]"


class Place(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file

    @property
    def nbytes(self) -> int:
        return nbytes_of((self.dtype, self.shape))


def check_byte_order() -> None:
    """Refuse a machine whose numbers have another byte order than those in files."""
    if sys.byteorder != "little":
        raise WeftError(f"safetensors files are little-endian (this machine: {sys.byteorder}-endian); use another one")


def nbytes_of(form: Form) -> int:
    return math.prod(form[1]) * form[0].itemsize


def stored_form(form: Form) -> Form:
    """The form in which weft stores a tensor: a complex one as pairs of real numbers."""
    dtype, shape = form
    return (dtype.to_real(), (*shape, 2)) if dtype.is_complex else form


def header_of(forms: Mapping[str, Form], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a file whose tensors follow in this order."""
    header: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, form in forms.items():
        if form[0] not in DTYPES:
            raise WeftError(f"safetensors has no {form[0]} ({name}); keep it in a dtype that it has")
        start, end = end, end + nbytes_of(form)
        header[name] = {"dtype": DTYPES[form[0]], "shape": list(form[1]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH)
    return struct.pack("<Q", len(text)) + text


def header_length(start: bytes, size: int) -> int:
    """The length of the header, from the first bytes of a file of `size` bytes. Raises ValueError if it can't be."""
    if len(start) < LENGTH:
        raise ValueError(f"it has {len(start)} bytes, and a header needs more")
    length = int(struct.unpack("<Q", start[:LENGTH])[0])
    if length > min(LONGEST, size - LENGTH):
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    return length


def places_in(text: bytes, size: int) -> dict[str, Place]:
    """Where each tensor is in a file of `size` bytes with this header. Raises ValueError if anything is not right."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"its header is not JSON ({problem})") from problem
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    header.pop(METADATA, None)
    base = LENGTH + len(text)
    entries = [(name, *_entry(name, value)) for name, value in header.items()]
    end = 0
    for name, _, _, start, stop in sorted(entries, key=lambda entry: entry[3:]):
        if start != end:
            raise ValueError(f"{name} {'overlaps another tensor' if start < end else 'leaves a gap'} at byte {start}")
        end = stop
    if base + end != size:
        what = "is cut off" if base + end > size else "has bytes that belong to no tensor"
        raise ValueError(f"it {what} (bytes: {size}, by its header: {base + end})")
    return {name: Place(dtype, shape, base + start) for name, dtype, shape, start, _ in entries}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header has {next(name for name in names if names.count(name) > 1)} twice")
    return found


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """The dtype, shape and offsets of a tensor."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop], **more} if not more:
            if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                raise ValueError(f"the shape or place of {name} is not of counts")
        case _:
            raise ValueError(f"its header does not give the dtype, shape and place of {name}")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, which PyTorch does not have")
    form = TORCH_DTYPES[dtype], tuple(shape)
    if stop - start != nbytes_of(form):
        raise ValueError(f"{name} has {stop - start} bytes, and {dtype} {form[1]} needs {nbytes_of(form)}")
    return *form, start, stop

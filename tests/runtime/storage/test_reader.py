"""Safetensors files, read into memory that is there: against the safetensors library, and files that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.process import status
from weft.runtime.storage import TensorFile, memory
from weft.runtime.storage.safetensors_header import DTYPES
from weft.runtime.storage.writer import write_each

shapes = st.lists(st.integers(0, 5), max_size=4)
everywhere = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def random_tensor(dtype: torch.dtype, shape: list[int]) -> Tensor:
    numbers = torch.randint(0, 100, shape)
    return numbers > 50 if dtype == torch.bool else numbers.to(dtype)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@everywhere
@given(st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(list(DTYPES)), shapes), max_size=6))
def test_it_reads_what_the_library_writes_and_the_other_way(
    tmp_path: Path, forms: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    forms.pop("__metadata__", None)
    tensors = {name: random_tensor(*form) for name, form in forms.items()}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_each(
        tmp_path / "own", {name: (dtype, tuple(shape)) for name, (dtype, shape) in forms.items()}, tensors.__getitem__
    )
    with safe_open(tmp_path / "own", framework="pt") as theirs:
        assert {name: bits(theirs.get_tensor(name)) for name in list(theirs.keys())} == {
            name: bits(tensor) for name, tensor in tensors.items()
        }
    for file in (TensorFile(tmp_path / "theirs"), TensorFile(tmp_path / "own")):
        assert file.names() == tensors.keys()
        for name, tensor in tensors.items():
            assert file.form(name) == (tensor.dtype, tuple(tensor.shape))
            read = torch.empty_like(tensor)
            file.read_into(name, read)
            assert bits(read) == bits(tensor)


@everywhere
@given(
    st.lists(st.integers(1, 7), min_size=0, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
    st.integers(8, 64),
)
def test_any_dtype_and_layout_is_filled_block_by_block(
    tmp_path: Path, shape: list[int], stored: torch.dtype, wanted: torch.dtype, is_transposed: bool, block: int
) -> None:
    tensor = torch.randn(shape).to(stored)
    save_file({"a": tensor}, tmp_path / "file")
    read = torch.full(shape[::-1], torch.nan, dtype=wanted).permute(tuple(reversed(range(len(shape)))))
    read = read if is_transposed else read.contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "BLOCK", block)
        TensorFile(tmp_path / "file").read_into("a", read)
    assert torch.equal(read, tensor.to(wanted))


def test_a_parameter_is_filled_in_place_and_autograd_knows(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0)}, tmp_path / "file")
    parameter = torch.nn.Parameter(torch.zeros(6))
    loss = (parameter * parameter).sum()
    before, memory = status.nbytes, parameter.data_ptr()
    TensorFile(tmp_path / "file").read_into("a", parameter)
    assert parameter.tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.data_ptr() == memory
    assert status.nbytes - before == 24
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


# Files that are refused


def entry(dtype: str = "F32", shape: list[int] | None = None, place: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": place or [0, 8]}


def packed(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes"),
    "short": (bytes(7), "it has 7 bytes"),
    "length past the end": (packed({"a": entry()})[:20], r"its header would have \d+ bytes, and the file has 20"),
    "huge length": (struct.pack("<Q", 1 << 63) + bytes(16), "its header would have"),
    "no JSON": (packed(b"{nothing"), "its header is not JSON"),
    "no text": (packed(b"\xff\xfe"), "its header is not JSON"),
    "a list": (packed([1]), "is not a table"),
    "deep": (packed(b"[" * 100_000), "its header is not JSON"),
    "twice": (
        packed(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"),
        "twice",
    ),
    "no dtype": (packed({"a": {"shape": [2], "data_offsets": [0, 8]}}), "does not give the dtype"),
    "no table": (packed({"a": 5}), "does not give the dtype"),
    "three offsets": (packed({"a": entry(place=[0, 4, 8])}), "does not give the dtype"),
    "unknown dtype": (packed({"a": entry("F99")}), "dtype F99"),
    "negative shape": (packed({"a": entry(shape=[-2])}), "not of counts"),
    "fraction": (packed({"a": entry(place=[0, 8.0])}), "not of counts"),
    "truth": (packed({"a": entry(shape=[True, 2])}), "not of counts"),
    "too large a shape": (packed({"a": entry(shape=[1 << 62, 1 << 62])}), "needs"),
    "too few bytes": (packed({"a": entry(shape=[3])}), r"a has 8 bytes, and F32 \(3,\) needs 12"),
    "backwards": (packed({"a": entry(shape=[], place=[8, 4])}), "a has -4 bytes"),
    "cut off": (packed({"a": entry()})[:-1], "it is cut off"),
    "more bytes": (packed({"a": entry()}) + b"x", "belong to no tensor"),
    "gap": (packed({"a": entry(), "b": entry(place=[16, 24])}, bytes(24)), "b leaves a gap"),
    "overlap": (packed({"a": entry(), "b": entry(place=[4, 12])}, bytes(12)), "b overlaps"),
    "same place": (packed({"a": entry(), "b": entry()}), "overlaps"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused(kind: str, tmp_path: Path) -> None:
    data, reason = DAMAGED[kind]
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(WeftError, match=reason) as refused:
        TensorFile(file)
    assert str(file) in str(refused.value)
    assert "use an intact copy" in str(refused.value)
    if kind != "twice":  # the library takes the last one
        with pytest.raises(SafetensorError), safe_open(file, framework="pt") as theirs:
            theirs.keys()


@everywhere
@given(st.integers(0, 200), st.integers(0, 255), st.booleans())
def test_no_damage_is_read_as_something_else(tmp_path: Path, place: int, value: int, is_cut: bool) -> None:
    """A header with another byte, or a file cut off, is refused, or read as the library reads it."""
    file = tmp_path / "file"
    save_file({"a": torch.arange(6.0), "b": torch.arange(4).reshape(2, 2)}, file)
    data = bytearray(file.read_bytes())
    place %= len(data)
    if is_cut:
        del data[place:]
    else:
        data[place] = value
    file.write_bytes(data)
    try:
        ours = TensorFile(file)
        read = {name: torch.empty(ours.form(name)[1], dtype=ours.form(name)[0]) for name in ours.names()}
        for name, tensor in read.items():
            ours.read_into(name, tensor)
    except WeftError:
        return
    with safe_open(file, framework="pt") as theirs:
        assert {name: bits(tensor) for name, tensor in read.items()} == {
            name: bits(theirs.get_tensor(name)) for name in list(theirs.keys())
        }


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0)}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-4])
    with pytest.raises(WeftError, match="became shorter while it was read"):
        file.read_into("a", torch.empty(6))


def complex_file(path: Path) -> None:
    path.write_bytes(packed({"a": entry("C64", [1])}))


@pytest.mark.parametrize(
    ("write", "name", "tensor", "reason"),
    [
        (None, "b", torch.empty(6), "has no b"),
        (None, "a", torch.empty(5), r"another shape \(file: \(6,\), here: \(5,\)\)"),
        (None, "a", torch.empty(6, device="meta"), "dense memory"),
        (None, "a", torch.empty(6).to_sparse(), "dense memory"),
        (complex_file, "a", torch.empty(1), "is complex"),
    ],
)
def test_a_destination_that_does_not_fit_is_refused(
    write: Callable[[Path], None] | None, name: str, tensor: Tensor, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    write(file) if write else save_file({"a": torch.arange(6.0)}, file)
    with pytest.raises(WeftError, match=reason):
        TensorFile(file).read_into(name, tensor)

"""Files of a checkpoint, written block by block: the bytes of safetensors, counted and hashed on the way."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.process import status
from weft.runtime.storage import memory, writer
from weft.runtime.storage.safetensors_header import DTYPES
from weft.runtime.storage.writer import FileWriter, write_each, write_safetensors


def tensors() -> dict[str, Tensor]:
    """Every dtype, and shapes with nothing or without dimensions."""
    made = {
        f"{number}/{str(dtype)[6:]}": torch.arange(6).to(dtype).reshape(2, 3) for number, dtype in enumerate(DTYPES)
    }
    return made | {"scalar": torch.tensor(1.5), "nothing": torch.zeros(0, 4), "ünï": torch.ones(3, dtype=torch.bool)}


def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors().items()}
    write_each(tmp_path / "own", forms, tensors().__getitem__)
    read = load_file(tmp_path / "own")
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].to(torch.complex128).tolist() == tensor.to(torch.complex128).tolist()


def test_the_file_is_that_of_the_library(tmp_path: Path) -> None:
    plain = {"b": torch.randn(5, 3), "a": torch.randn(7), "c": torch.randn(2, 2)}
    write_safetensors(tmp_path / "own", plain)
    save_file(plain, tmp_path / "theirs")
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_strides_of_dimensions_of_one_element_do_not_matter(tmp_path: Path) -> None:
    row = torch.arange(6.0).reshape(2, 3).t()[1:2, 1:2]
    assert row.is_contiguous()
    assert row.stride() == (1, 3)
    write_safetensors(tmp_path / "own", {"a": row.t()})
    assert load_file(tmp_path / "own")["a"].tolist() == [[4]]


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    """Also behind tensors of small dtypes, so that a mapped file can be used in place."""
    mixed = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(1)}
    write_safetensors(tmp_path / "own", mixed)
    text = (tmp_path / "own").read_bytes()
    header = int.from_bytes(text[:8], "little")
    assert header % 8 == 0
    assert text[8 + header :][:8] == mixed["b"][:1].numpy().tobytes()


def test_a_writer_counts_hashes_and_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync
    monkeypatch.setattr(memory, "BLOCK", 10)
    monkeypatch.setattr(writer, "SYNC_EVERY", 25)

    def counting(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", counting)
    before, data = status.nbytes, os.urandom(64)
    with FileWriter(tmp_path / "file") as file:
        file.write(data[:5])
        file.write(data[5:])
    assert (tmp_path / "file").read_bytes() == data
    assert file.entry == {"bytes": 64, "sha256": hashlib.sha256(data).hexdigest()}
    assert status.nbytes - before == 64
    assert synced == [25, 55, 64]  # on the way, so that the last one is short; and at the end


def test_complex_numbers_are_pairs_in_a_checkpoint(tmp_path: Path) -> None:
    """Also those with a lazy conjugation, and negative ones."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    write_safetensors(tmp_path / "own", {"a": numbers.conj(), "b": numbers.conj().imag})
    read = load_file(tmp_path / "own")
    assert read["a"].tolist() == [[1, -2], [3, 4]]
    assert read["b"].tolist() == [-2, 4]


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"safetensors has no torch.complex128 \(a\)"):
        write_each(tmp_path / "own", {"a": (torch.complex128, (2,))}, lambda name: torch.ones(2))


def test_tensors_are_read_when_their_turn_comes(tmp_path: Path) -> None:
    """And none is held longer."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = []

    def read(name: str) -> Tensor:
        tensor = torch.full((3,), float(name))
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    write_each(tmp_path / "own", dict.fromkeys("123", (torch.float32, (3,))), read, {"format": "pt"})
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "own").items()} == {
        name: [float(name)] * 3 for name in "123"
    }
    assert most == [1, 1, 1]

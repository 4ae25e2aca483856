"""Models that are written as one file or as shards: what transformers and weft read, and failures on the way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.helpers.sources import InMemory, read_all
from torch import Tensor

from weft.runtime.storage import StoredWeights, model_folder, write_model

TENSORS = {
    "a": torch.arange(4.0),  # 16 bytes
    "b": torch.arange(3),  # 24
    "c": torch.ones(2, 2, dtype=torch.bfloat16),  # 8
    "d": torch.arange(10.0),  # 40
    "e": torch.zeros(0, 3),
}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    assert write_model(tmp_path, InMemory(TENSORS)) == tmp_path / "model.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors"), TENSORS)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_is_several_files(tmp_path: Path) -> None:
    """Each as full as it may be, in the order of the tensors; a tensor above the limit has its own."""
    source = InMemory(TENSORS)
    assert write_model(tmp_path, source, shard_size=39) == tmp_path / "model.safetensors.index.json"
    files = [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    assert [list(load_file(tmp_path / file)) for file in files] == [["a"], ["b", "c"], ["d"], ["e"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 88}
    assert index["weight_map"] == {"a": files[0], "b": files[1], "c": files[1], "d": files[2], "e": files[3]}
    assert same(read_all(StoredWeights(tmp_path)), TENSORS)
    assert sorted(source.read) == sorted(TENSORS)


@pytest.mark.parametrize(("before", "after"), [(39, 1000), (1000, 39), (39, 16)])
def test_an_earlier_model_is_replaced(before: int, after: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    write_model(tmp_path, InMemory({name: tensor + 1 for name, tensor in TENSORS.items()}), shard_size=before)
    write_model(tmp_path, InMemory(TENSORS), shard_size=after)
    assert same(read_all(StoredWeights(tmp_path)), TENSORS)
    assert (tmp_path / "config.json").exists()


def test_a_failed_write_keeps_the_earlier_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, InMemory(TENSORS), shard_size=39)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_model(tmp_path, InMemory({name: tensor + 1 for name, tensor in TENSORS.items()}), shard_size=20)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shards_of_two_models_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process dies before the index is there, there is no index: not that of the earlier model."""
    write_model(tmp_path, InMemory(TENSORS), shard_size=39)

    def dies(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_folder, "replace_file", dies)
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path, InMemory(changed), shard_size=39)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert same(read_all(StoredWeights(tmp_path)), changed)

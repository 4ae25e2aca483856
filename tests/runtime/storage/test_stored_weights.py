"""Weights in a file, in a folder with or without an index, and in a checkpoint."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.sources import read_all
from torch import Tensor, nn

import weft
from weft.errors import WeftError
from weft.runtime.checkpoint import stored_weights
from weft.runtime.storage import StoredWeights

FIRST = {"a": torch.arange(4.0), "b": torch.arange(6).reshape(2, 3)}
SECOND = {"c": torch.ones(2, dtype=torch.bfloat16)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


def write_index(folder: Path, files: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_file(FIRST, tmp_path / "model-00001-of-00002.safetensors")
    save_file(SECOND, tmp_path / "model-00002-of-00002.safetensors")
    write_index(
        tmp_path, dict.fromkeys(FIRST, "model-00001-of-00002.safetensors") | {"c": "model-00002-of-00002.safetensors"}
    )
    return tmp_path


def test_one_file(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "any.name")
    assert_same(read_all(StoredWeights(tmp_path / "any.name")), FIRST)


def test_a_folder_with_an_index(shards: Path) -> None:
    (shards / "consolidated.safetensors").write_bytes(b"not of this model")
    assert_same(read_all(StoredWeights(shards)), FIRST | SECOND)


def test_only_the_files_that_are_needed_are_opened(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").write_bytes(b"damaged")
    source = StoredWeights(shards)
    assert set(source.names()) == {"a", "b", "c"}
    read = torch.empty(4)
    source.read_into("a", read)
    assert torch.equal(read, FIRST["a"])
    with pytest.raises(WeftError, match=r"00002-of-00002.safetensors is not an intact"):
        source.form("c")


def test_a_folder_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    assert_same(read_all(stored_weights(shards)), FIRST | SECOND)


def nothing(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def shard_is_missing(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_is_no_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def index_has_no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def index_leads_elsewhere(folder: Path) -> None:
    write_index(folder, {"a": "../secret.safetensors"})


def two_indices(folder: Path) -> None:
    write_index(folder, {}, "model.fp16.safetensors.index.json")


def whole_model_too(folder: Path) -> None:
    save_file(FIRST | SECOND, folder / "model.safetensors")


def the_same_tensor_twice(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    save_file(FIRST, folder / "model-00003.safetensors")


def wrong_shard(folder: Path) -> None:
    write_index(folder, dict.fromkeys("abc", "model-00001-of-00002.safetensors"))


def pickles_only(folder: Path) -> None:
    nothing(folder)
    torch.save(FIRST, folder / "pytorch_model.bin")


def no_folder(folder: Path) -> None:
    nothing(folder)
    folder.rmdir()


REFUSED: dict[Callable[[Path], None], str] = {
    nothing: "weights are safetensors files .* holds none",
    pickles_only: "pytorch_model.bin is a pickle .torch.save., which weft does not read; convert it: safetensors",
    no_folder: "can't be read: No such file",
    shard_is_missing: "00002-of-00002.safetensors, which is not there",
    index_is_no_json: "has no weight_map .*JSONDecodeError",
    index_has_no_map: "has no weight_map .*KeyError",
    index_leads_elsewhere: "secret.safetensors, which is not a file of its folder",
    two_indices: "several models .model.fp16.safetensors.index.json, model.safetensors.index.json",
    whole_model_too: "several models .model.safetensors.index.json, model.safetensors",
    the_same_tensor_twice: "has . twice, in model-00001-of-00002.safetensors and model-00003",
    wrong_shard: "00001-of-00002.safetensors has no c",
}


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_a_folder_that_is_not_clear_is_refused(damage: Callable[[Path], None], shards: Path) -> None:
    damage(shards)
    with pytest.raises(WeftError, match=REFUSED[damage]):
        read_all(StoredWeights(shards))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_pickle_is_refused(tmp_path: Path, new: bool) -> None:
    torch.save(FIRST, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(WeftError, match=r"model\.pt is a pickle .*torch\.load\(path, weights_only=True\)"):
        StoredWeights(tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x02" + bytes(6), b"something else"])
def test_other_files_are_not_taken_for_pickles(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(WeftError, match="is not an intact safetensors file"):
        StoredWeights(tmp_path / "model.pt")


def test_a_header_that_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    """Its length, 640, has the bytes 80 02."""
    tensors = {f"{number:03}": torch.arange(1.0) + number for number in range(9)}
    text = json.dumps(
        {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * place, 4 * place + 4]}
            for place, name in enumerate(tensors)
        }
    )
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    (tmp_path / "file").write_bytes(struct.pack("<Q", 640) + text.ljust(640).encode() + data)
    assert_same(read_all(StoredWeights(tmp_path / "file")), tensors)


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").touch()
    with pytest.raises(WeftError, match=r"is the folder of a run.*checkpoints/update-….*weft export"):
        stored_weights(tmp_path)


def test_an_unknown_name_is_refused(shards: Path) -> None:
    with pytest.raises(WeftError, match="has no weight; use the weights of this model"):
        StoredWeights(shards).form("weight")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "file")
    (tmp_path / "file").chmod(0)
    with pytest.raises(WeftError, match="can't be read: Permission denied"):
        StoredWeights(tmp_path / "file")


def test_a_checkpoint(tmp_path: Path) -> None:
    """Its tensors have plain names, tied ones all of theirs; a damaged file is refused before anything is read."""
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    model = nn.Sequential(first, nn.BatchNorm1d(4), last)
    pipe = weft.Pipeline(
        model, loss_fn=nn.MSELoss(), optimizer=torch.optim.Adam, schedule="2bw", stages=2, microbatches=2
    )
    pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    pipe.save(tmp_path / "saved")
    assert_same(read_all(stored_weights(tmp_path / "saved")), pipe.state_dict())
    assert stored_weights(tmp_path / "saved").form("1.num_batches_tracked") == (torch.int64, ())
    with pytest.raises(WeftError, match=r"has no 3.weight"):
        stored_weights(tmp_path / "saved").form("3.weight")
    damaged = tmp_path / "saved" / "chunk-000.safetensors"
    *content, last_byte = damaged.read_bytes()
    damaged.write_bytes(bytes([*content, last_byte ^ 1]))
    read = torch.zeros(4, 4)
    with pytest.raises(WeftError, match=r"chunk-000.safetensors was altered"):
        stored_weights(tmp_path / "saved").read_into("0.weight", read)
    assert not read.any()

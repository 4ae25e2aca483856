"""Writes a model as transformers do: one safetensors file, or shards with an index if it is large.

    model.safetensors
    model-00001-of-00003.safetensors …, model.safetensors.index.json

One tensor at a time is read from its source. The files appear when all of them are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.output import replace_file, sync
from weft.runtime.storage.safetensors_header import Form, nbytes_of
from weft.runtime.storage.source import TensorSource
from weft.runtime.storage.writer import write_each

SHARD_SIZE = 5 * 10**9  # bytes
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def write_model(folder: Path, source: TensorSource, *, shard_size: int = SHARD_SIZE) -> Path:
    """Write all tensors of a source into files of at most `shard_size` bytes; replaces a model that is there.

    Returns the file of the model, or the index.
    """
    forms = {name: source.form(name) for name in source.names()}
    shards = _shards(forms, shard_size)
    count = len(shards)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)] if count > 1 else [WHOLE]
    temporary = [folder / f".{file}.part" for file in files]

    memory = torch.empty(max(map(nbytes_of, forms.values()), default=0), dtype=torch.uint8)

    def read(name: str) -> Tensor:
        dtype, shape = forms[name]
        tensor = memory[: nbytes_of(forms[name])].view(dtype).view(shape)
        source.read_into(name, tensor)
        return tensor

    try:
        for part, names in zip(temporary, shards, strict=True):
            write_each(part, {name: forms[name] for name in names}, read, {"format": "pt"})
        _remove_model(folder)
        for part, file in zip(temporary, files, strict=True):
            part.replace(folder / file)
        sync(folder)
        if count > 1:  # at last: without an index, the folder is not taken for a model
            replace_file(folder / INDEX, _index(forms, files, shards))
    finally:
        for part in temporary:
            part.unlink(missing_ok=True)
    return folder / (WHOLE if count == 1 else INDEX)


def _shards(forms: Mapping[str, Form], size: int) -> list[list[str]]:
    """The names of each file, in their order; a tensor above the size has a file of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, form in forms.items():
        if shards[-1] and held + nbytes_of(form) > size:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes_of(form)
    return shards


def _index(forms: Mapping[str, Form], files: list[str], shards: list[list[str]]) -> str:
    total = sum(map(nbytes_of, forms.values()))
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def _remove_model(folder: Path) -> None:
    """Remove the files of an earlier model, the index first."""
    for path in [folder / INDEX, folder / WHOLE, *folder.iterdir()]:
        if path.name in (INDEX, WHOLE) or SHARD.fullmatch(path.name):
            path.unlink(missing_ok=True)

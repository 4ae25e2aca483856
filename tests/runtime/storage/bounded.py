"""Measures, in a process of its own, how much memory saving, loading and exporting take; prints JSON.

The model has four tensors of 16 MiB. Each figure has a control: the same with a second copy of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.helpers.resident import grown
from tests.helpers.sources import InMemory, read_all
from torch import Tensor, nn

import weft
from weft.runtime.checkpoint import files, pipeline_state, stored_weights
from weft.runtime.storage import write_model, write_safetensors

NARROW, WIDE = 1024, 4096


def pipeline() -> weft.Pipeline:
    sizes = [(NARROW, WIDE), (WIDE, NARROW)] * 2
    return weft.Pipeline(
        nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes)),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        schedule="1f1b",
        stages=2,
        microbatches=2,
    )


def exported(folder: Path, source: Any) -> None:
    folder.mkdir()
    write_model(folder, source, shard_size=40_000_000)


def whole(source: Iterator[tuple[str, Tensor]]) -> None:
    dict(source)


def one_by_one(source: Iterator[tuple[str, Tensor]]) -> None:
    for _ in source:
        pass


def main(folder: Path) -> dict[str, list[int]]:
    """By what is measured: its MiB, and those with a second copy."""
    torch.set_num_threads(1)
    write, prepare = write_safetensors, pipeline_state._prepare

    def write_copies(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return write(file, {name: tensor.clone() for name, tensor in tensors.items()})

    def prepare_copies(checkpoint: files.Checkpoint, assembly: Any) -> Any:
        copies = [checkpoint.tensor(key) for key in checkpoint.state["tensors"] if key.startswith("model/")]
        install, extra = prepare(checkpoint, assembly)
        return lambda: (install(), copies), extra

    pipe = pipeline()
    pipe.step(torch.ones(2, NARROW), torch.ones(2, NARROW))
    pipe.flush()
    found: dict[str, list[int]] = {}
    found["save"] = [grown(lambda: pipe.save(folder / "saved"))]
    with patch.object(files, "write_safetensors", write_copies):
        found["save"].append(grown(lambda: pipe.save(folder / "copied")))
    found["load"] = [grown(lambda: pipe.load(folder / "saved"))]
    with patch.object(pipeline_state, "_prepare", prepare_copies):
        found["load"].append(grown(lambda: pipe.load(folder / "saved")))
    found["stream"] = [grown(lambda: one_by_one(pipe.iter_state_dict())), grown(lambda: whole(pipe.iter_state_dict()))]
    weights = stored_weights(folder / "saved")
    found["export"] = [grown(lambda: exported(folder / "one", weights))]
    found["export"].append(grown(lambda: exported(folder / "two", InMemory(read_all(weights)))))
    new = [pipeline(), pipeline()]
    found["load into a new pipeline"] = [grown(lambda: new[0].load(folder / "saved"))]
    with patch.object(pipeline_state, "_prepare", prepare_copies):
        found["load into a new pipeline"].append(grown(lambda: new[1].load(folder / "saved")))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

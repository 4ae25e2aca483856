"""Small jobs for the tests, and what to look at in their runs."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.cli import main
from weft.runtime.checkpoint import read_model
from weft.train.run import Folder, read_metrics

TINY: dict[str, Any] = {
    "name": "tiny",
    "model.name": "mlp",
    "model.layers": 8,
    "model.width": 16,
    "model.dropout": 0.1,
    "data.name": "synthetic",
    "data.form": "values",
    "data.samples": 200,
    "train.batch": 16,
    "train.updates": 24,
    "train.lr": 0.01,
    "schedule.ranks": 2,
    "evaluate.every": 8,
    "checkpoint.every": 8,
    "log.every": 2,
}


def tiny(**changes: Any) -> list[str]:
    """The `--set` arguments of the tiny job with changes; `a__b=1` is the key `a.b`."""
    settings = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def train(*arguments: str, **changes: Any) -> int:
    """`weft train` of the tiny job with changes, on virtual ranks in this process; its exit code."""
    return main(["train", *tiny(schedule__virtual=True, **changes), *arguments])


def weights(run: Path, which: str = "latest") -> dict[str, Tensor]:
    """The model of a run's checkpoint."""
    path = Folder(run).find(which)
    assert path is not None
    return read_model(path)


def same(model: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two models are equal to the bit."""
    return model.keys() == other.keys() and all(torch.equal(model[name], other[name]) for name in model)


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics of one kind."""
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == kind]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port

"""Small jobs for the tests, and what to look at in their runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.runtime.checkpoint import read_model
from weft.train.run.folder import Folder

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


def words(**changes: Any) -> list[str]:
    """The `--set` words of the tiny job with changes; `a__b=1` is the key `a.b`."""
    settings = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def start(*arguments: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """`weft` in a process of its own; whoever starts it waits for it."""
    command = [sys.executable, "-m", "weft", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def finish(process: subprocess.Popen[str], timeout: float = 400) -> tuple[int, str, str]:
    """Its exit code, output and errors; it is killed if it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{out}\n{err}") from None
    return process.returncode, out, err


def weights(run: Path, which: str = "latest") -> dict[str, Tensor]:
    """The model of a run's checkpoint."""
    found = Folder(run).find(which)
    assert found is not None
    return read_model(found)


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics of one kind."""
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if line["kind"] == kind]

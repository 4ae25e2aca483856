"""`metrics.jsonl`: one object a line, for people, plots and other programs; and TensorBoard events on request.

{"kind": "train", "update": 10, "samples": 480, "seconds": 1.9, "loss": 4.1, "lr": 0.0005, …}
{"kind": "evaluation", "update": 150, …, "loss": 2.2, "perplexity": 9.1}
{"kind": "save failed", "update": 300, …, "problem": "can't write …"}
{"kind": "staleness", "update": 50, "chunk": 0, "predicted": 0.11, "stale": 0.15}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import json_safe, write_text
from weft.train.extras import need
from weft.train.run.events import Evaluated, Event, SaveFailed, StalenessSampled, Stepped


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; an incomplete last line, which a killed run leaves, is skipped."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    read = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            read.append(json.loads(line))
        except json.JSONDecodeError:
            raise WeftError(f"{path}, line {number} is not JSON; fix or remove it") from None
    return read


class Metrics:
    """Records the events of a run; a resumed run drops the lines beyond its checkpoint."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["update"] <= update]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if tensorboard:
            need("tensorboard", "tensorboard", purpose="log.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "events"), purge_step=update + 1)

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped(progress=progress):
                self.write("train", progress.place | progress.figures)
            case Evaluated(progress=progress, metrics=metrics):
                self.write("evaluation", progress.place | metrics)
            case SaveFailed(progress=progress, problem=problem):
                self.write("save failed", progress.place | {"problem": problem})
            case StalenessSampled(samples=samples):
                for sample in samples:
                    self.write("staleness", sample)

    def write(self, kind: str, figures: dict[str, Any]) -> None:
        """Add a line; a number that is not finite becomes null."""
        line: dict[str, Any] = {"kind": kind} | json_safe(figures)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            tag = kind if "chunk" not in figures else f"{kind}/chunk {figures['chunk']}"
            for name, value in line.items():
                if isinstance(value, int | float) and name not in ("update", "chunk"):
                    self._tensorboard.add_scalar(f"{tag}/{name}", value, figures["update"])
            self._tensorboard.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *problem: object) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

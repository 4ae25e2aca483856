"""`metrics.jsonl`: one object a line, for people, plots and other programs; and TensorBoard events, if wanted.

{"kind": "train", "update": 10, "samples": 480, "seconds": 1.9, "loss": 4.1, "lr": 0.0005, …}
{"kind": "evaluation", "update": 150, …, "loss": 2.2, "perplexity": 9.1}
{"kind": "staleness", "update": 50, …, "chunk": 0, "predicted": 0.11, "stale": 0.15}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import write_text
from weft.train.extras import need


def read(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; a last one that is not whole, as a killed run leaves it, is left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            raise WeftError(f"{path}, line {number} is not JSON; mend or remove it") from None
    return found


class Metrics:
    """Where a run's figures go; a run that is resumed drops those beyond its checkpoint."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read(self.path) if line["update"] <= update]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            need("tensorboard", "tensorboard", purpose="log.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "events"), purge_step=update + 1)

    def write(self, kind: str, figures: dict[str, Any]) -> dict[str, Any]:
        """Add a line; what is not finite is null, for JSON has no such numbers."""
        line: dict[str, Any] = {"kind": kind} | plain(figures)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            place = kind if "chunk" not in figures else f"{kind}/chunk {figures['chunk']}"
            for name, value in line.items():
                if isinstance(value, int | float) and name not in ("update", "chunk"):
                    self._events.add_scalar(f"{place}/{name}", value, figures["update"])
            self._events.flush()
        return line

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def plain(value: Any) -> Any:
    """Data for JSON: what is not finite is None."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

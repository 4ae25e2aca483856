"""How far a run is and how fast: what the display shows and the metrics record."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A moment of a run; loss, speed and bubbles are of the updates since the last such moment."""

    updates: int  # of the whole run
    update: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    norm: float | None = None  # of the gradients before clipping; None if no norm is computed
    lr: float = 0.0
    samples_per_second: float = 0.0
    seconds_left: float = math.nan
    bubbles: tuple[float, ...] = ()  # of each rank
    memory: tuple[int, ...] = ()  # peak bytes of each rank, counted
    resident: tuple[dict[str, int], ...] = ()  # of each process; see `Pipeline.resident`
    waited_for_data: float = 0.0  # seconds, over the whole run

    @property
    def bubble(self) -> float:
        """The mean of all ranks; NaN until it is known."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else math.nan

    @property
    def place(self) -> dict[str, Any]:
        """Where in the run this is; every line of metrics begins with it."""
        return {"update": self.update, "samples": self.samples, "seconds": self.seconds}

    @property
    def figures(self) -> dict[str, Any]:
        """The rest of a line of metrics."""
        return {
            "loss": self.loss,
            **({} if self.norm is None else {"norm": self.norm}),
            "lr": self.lr,
            "samples_per_second": self.samples_per_second,
            "bubble": self.bubble,
            "bubbles": list(self.bubbles),
            "memory": list(self.memory),
            "resident": [figures["now"] for figures in self.resident],
            "waited_for_data": self.waited_for_data,
        }


class Clock:
    """Seconds of training: without set-up, evaluations and checkpoints, including those before a resume."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self.spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.spent, self._since = self.seconds, None

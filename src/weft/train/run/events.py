"""What the loop reports. Display, metrics and folder subscribe to these events; the loop does not know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weft.schedule import Timeline
from weft.train.run.progress import Progress

if TYPE_CHECKING:
    from weft.runtime import Report


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Updates were made since the last event of this kind; see `LoopOptions.log_every`."""

    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model was evaluated on held-out data."""

    progress: Progress
    metrics: dict[str, float]
    best: bool  # so far


@dataclass(frozen=True, kw_only=True)
class StalenessSampled:
    """New samples of how stale weights were: update, chunk, distance with and without prediction."""

    samples: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint is complete; ranks go on when all subscribers have returned."""

    path: Path
    best: bool  # whether it holds the best model so far


@dataclass(frozen=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be saved; the run goes on, and tries again at the next one."""

    progress: Progress
    problem: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run is over; `outcome` is "finished", "stopped" (on request) or "stopped early" (out of patience)."""

    outcome: str
    progress: Progress
    report: Report
    timeline: Timeline | None  # of the last mini-batches


Event: TypeAlias = Stepped | Evaluated | StalenessSampled | Saved | SaveFailed | Ended
Subscriber: TypeAlias = Callable[[Event], None]

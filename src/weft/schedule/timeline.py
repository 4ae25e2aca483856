"""A schedule with times, simulated or measured: the input of all drawings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.schedule.actions import Op
from weft.schedule.core import Schedule
from weft.schedule.program import Step


@dataclass(frozen=True, kw_only=True)
class Block:
    """One executed action on a rank."""

    rank: int
    start: float
    end: float
    step: Step

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; the version of an update is the one it makes, and an update has no delay."""
        step, update = self.step, self.step.action.op == Op.U
        return {
            "rank": self.rank,
            "start": self.start,
            "end": self.end,
            "action": str(step.action),
            "minibatch": step.minibatch,
            "version": step.version,
            "delay": None if update else step.minibatch - step.version,
            "ahead": step.ahead,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """All blocks of a window of mini-batches, and what is known of the steady state.

    `mean_delay`: over micro-batches and parameters, in updates. `slack`: how much longer messages may take at no cost.
    """

    schedule: Schedule
    minibatches: int
    blocks: tuple[Block, ...]
    makespan: float
    mean_delay: float | None = None
    slack: float | None = None

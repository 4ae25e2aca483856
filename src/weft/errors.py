"""What weft raises.

WeftError (a ValueError)      the user's input breaks a rule: rule, values and remedy in one line
├── ScheduleError             a schedule breaks a rule of the verifier: also the grid, the place marked
└── Diverged                  training has gone to a loss that is not finite
RunError (a RuntimeError)     a run broke: names the rank and, where there is one, chunk, micro-batch and cause
└── PeerError                 it broke on another rank, which has the cause
"""

from __future__ import annotations

from typing import Any


class WeftError(ValueError):
    """The input breaks a rule; the message states the rule, the values and the remedy."""


class ScheduleError(WeftError):
    """A schedule that can't be run, with the rule that it breaks and the place where it does."""

    def __init__(self, rule: str, problem: str, *, grid: str = "") -> None:
        self.rule = rule
        self.problem = problem
        self.grid = grid
        super().__init__(f"{rule}: {problem}" + (f"\n{grid}" if grid else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it can pass from one process to another."""
        return _again, (self.rule, self.problem, self.grid)


class Diverged(WeftError):
    """A loss that is not finite, where such mini-batches are not to be left out."""


class RunError(RuntimeError):
    """A run that broke; `mistake` is the message of the WeftError that it broke of, where it was one."""

    mistake: str | None = None


class PeerError(RunError):
    """A run that broke on another rank; the message tells which one and why, as far as it is known here."""


def one_line(problem: BaseException) -> str:
    """An exception as `Type: first line of its message`, to stand inside another message."""
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0]}" if text else type(problem).__name__


def _again(rule: str, problem: str, grid: str) -> ScheduleError:
    return ScheduleError(rule, problem, grid=grid)

"""The exceptions of weft.

WeftError (a ValueError)      the user's input breaks a rule; the message has rule, values and remedy in one line
├── ScheduleError             a schedule breaks a rule of the verifier; the message also has the grid with a mark
└── Diverged                  the loss or the gradients of training are not finite
RunError (a RuntimeError)     a run failed; the message names the rank and, if known, chunk, micro-batch and cause
├── PeerError                 a run failed on another rank, which reports the cause
└── StorageError              a file of a run could not be written or read: no space, an I/O error, a stale handle
"""

from __future__ import annotations

import errno
from typing import Any


class WeftError(ValueError):
    """The input breaks a rule; the message states the rule, the values and the remedy."""


class ScheduleError(WeftError):
    """A schedule can't run: `rule` is the broken rule, `problem` what breaks it, `grid` shows where."""

    def __init__(self, rule: str, problem: str, *, grid: str = "") -> None:
        self.rule = rule
        self.problem = problem
        self.grid = grid
        super().__init__(f"{rule}: {problem}" + (f"\n{grid}" if grid else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, so that the error can be sent to another process."""
        return _rebuild, (self.rule, self.problem, self.grid)


class Diverged(WeftError):
    """The loss or the gradients are not finite, and the job does not skip such mini-batches, or skipped too many."""


class RunError(RuntimeError):
    """A run failed; if a WeftError was the cause, `mistake` is its message."""

    mistake: str | None = None


class PeerError(RunError):
    """A run failed on another rank; the message has the rank and the cause, if they are known on this rank."""


class StorageError(RunError):
    """A file of a run could not be written or read; training itself could go on."""


REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.ENOENT: "name a file in a folder that exists",
    errno.ENOTDIR: "name a file in a folder that exists",
    errno.EACCES: "choose a place that you may write",
    errno.EPERM: "choose a place that you may write",
    errno.EROFS: "choose a place that you may write",
}


def remedy_for(problem: OSError) -> str:
    """What a user can do about a file that can't be written or read."""
    return REMEDIES.get(problem.errno or 0, "check the file system")


def one_line(problem: BaseException) -> str:
    """An exception as `Type: first line of its message`, for use in another message."""
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0]}" if text else type(problem).__name__


def _rebuild(rule: str, problem: str, grid: str) -> ScheduleError:
    return ScheduleError(rule, problem, grid=grid)

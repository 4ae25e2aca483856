"""The resident set of a process, its peaks, and a limit for it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import status


def empty_process() -> int:
    """The resident set of a process that has imported torch and weft and trained something tiny.

    The tiny training loads what torch loads at its first use.
    """
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.autograd.backward([layer(torch.randn(8, 8)).sum()])
    optimizer.step()
    return status("VmRSS")


class Moments:
    """The peak of the resident set in each moment of a run, beyond an empty process; and how long each took."""

    def __init__(self) -> None:
        self.empty = empty_process()
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def note(self, moment: str, work: Callable[[], object]) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        begin = time.monotonic()
        work()
        self.seconds[moment] = time.monotonic() - begin
        self.peaks[moment] = status("VmHWM") - self.empty


def limit_growth(nbytes: int) -> None:
    """Let allocations fail that take this process beyond this many bytes more of data than it has now."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + nbytes, hard))

"""The resident set of this process, and how much it grows while something runs. Linux only."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20


def figures() -> dict[str, int]:
    """VmRSS, VmHWM and others, in bytes."""
    text = Path("/proc/self/status").read_text()
    return {name: int(amount) << 10 for name, amount in re.findall(r"(\w+):\s+(\d+) kB", text)}


def grown(work: Callable[[], object]) -> int:
    """The MiB by which the resident set was larger at its peak than before.

    Freed memory is given back first: a copy that fits into it would not be seen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = figures()["VmRSS"]
    work()
    return (figures()["VmHWM"] - before) // MIB

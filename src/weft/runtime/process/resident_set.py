"""The memory of this process as the system counts it: its resident set, now and at its peak."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

STATUS = Path("/proc/self/status")
FIELD = re.compile(r"^(VmRSS|VmHWM|RssShmem):\s+(\d+) kB$", re.MULTILINE)


class Resident(NamedTuple):
    """Bytes of the resident set; without Linux, only the peak is known."""

    now: int
    peak: int  # since the process started
    shared: int  # of those now, memory that other processes map, too


def resident() -> Resident:
    """The resident set of this process."""
    try:
        found = {name: int(amount) << 10 for name, amount in FIELD.findall(STATUS.read_text())}
    except OSError:
        found = {}
    if "VmRSS" in found and "VmHWM" in found:
        return Resident(found["VmRSS"], max(found["VmRSS"], found["VmHWM"]), found.get("RssShmem", 0))
    peak = _peak()
    return Resident(peak, peak, 0)


def _peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""Whether the batch of a failed trial did not fit: only if a rank reports a failed allocation.

A rank whose allocation fails leaves a mark (a file) and fails; the others see a lost peer, and all of them end. Any
other failure of a trial (a bug, a deadline, a killed rank) leaves no mark and is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.errors import PeerError

GRACE = 20.0  # seconds for the failed rank to leave its mark, before the others end
ALLOCATION = re.compile(  # the last one is oneDNN's, of bf16
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|std::bad_alloc|could not create a primitive"
)


def failed_allocation(problem: BaseException) -> bool:
    """Whether an allocation of this rank failed; a peer's error repeats the text of another rank's failure."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, PeerError):
            return False
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and ALLOCATION.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextlib.contextmanager
def marks_failed_allocation(folder: Path, rank: int) -> Iterator[None]:
    """Leave a mark if an allocation fails in the body; if the process dies of it, its stderr is the mark."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(folder / f"stderr{rank}", "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception as problem:
        if failed_allocation(problem):
            (folder / f"full{rank}").touch()
        elif isinstance(problem, PeerError):
            _wait_for_mark(folder)
        raise
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _wait_for_mark(folder: Path) -> None:
    end = time.monotonic() + GRACE
    while time.monotonic() < end and not any(folder.glob("full*")):
        time.sleep(0.05)


def begin_trial(folder: Path, state: dict[str, Any]) -> None:
    """Store what is known and which batch is tried, for the ranks that continue the search."""
    new = folder / "new"
    new.write_text(json.dumps(state))
    new.replace(folder / "trying")


def failed_trial(folder: Path) -> dict[str, Any] | None:
    """After a failure: the state that the last trial began with, if its batch did not fit, else None."""
    if not (folder / "trying").exists():
        return None
    stderr = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("stderr*")))
    if any(folder.glob("full*")) or ALLOCATION.search(stderr):
        found: dict[str, Any] = json.loads((folder / "trying").read_text())
        return found
    sys.stderr.write(stderr)
    return None

"""What a failed trial says of its batch: it does not fit only if a rank tells that an allocation failed.

A rank whose allocation fails leaves a mark, and fails; the others hear of it as of any lost rank, and all of them are
ended. Whatever else breaks a trial (a mistake, a deadline, a rank that somebody kills) leaves no mark: it is an error.
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

GRACE = 20.0  # seconds for the rank that failed to leave its mark, before the others end as well
ALLOCATION = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|std::bad_alloc")


def failed_allocation(problem: BaseException) -> bool:
    """Whether this rank's own allocation failed; a peer's error has its text too, but is not its own."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, PeerError):
            return False
        if isinstance(seen, MemoryError) or (isinstance(seen, RuntimeError) and ALLOCATION.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextlib.contextmanager
def told(folder: Path, rank: int) -> Iterator[None]:
    """Leave a mark where an allocation fails; where a process ends of it without a word, its stderr is the mark."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(folder / f"stderr{rank}", "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception as problem:
        if failed_allocation(problem):
            (folder / f"full{rank}").touch()
        elif isinstance(problem, PeerError):
            _wait_for_a_mark(folder)
        raise
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _wait_for_a_mark(folder: Path) -> None:
    end = time.monotonic() + GRACE
    while time.monotonic() < end and not any(folder.glob("full*")):
        time.sleep(0.05)


def begin(folder: Path, state: dict[str, Any]) -> None:
    """Say what is known, and which batch is tried, so that others can go on from there."""
    new = folder / "new"
    new.write_text(json.dumps(state))
    new.replace(folder / "trying")


def too_large(folder: Path) -> dict[str, Any] | None:
    """Of ranks that have failed: the state that they began their last trial with, if its batch did not fit."""
    if not (folder / "trying").exists():
        return None
    said = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("stderr*")))
    if any(folder.glob("full*")) or ALLOCATION.search(said):
        found: dict[str, Any] = json.loads((folder / "trying").read_text())
        return found
    sys.stderr.write(said)
    return None

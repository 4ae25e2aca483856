"""What a rank still does for its peers before it leaves the process group at its end."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

_last_duties: list[weakref.finalize[Any, Any]] = []


def before_leaving(duty: weakref.finalize[Any, Any]) -> None:
    """Call this finalizer before the process group is destroyed, unless its object is gone by then."""
    _last_duties[:] = [earlier for earlier in _last_duties if earlier.alive]
    _last_duties.append(duty)


def finish_duties() -> None:
    """Do all that is left; the caller is about to destroy the process group."""
    while _last_duties:
        with contextlib.suppress(Exception):  # the rank has its result, and its peers notice what they miss
            _last_duties.pop()()

"""What a rank still does for its peers before it leaves the process group at its end."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

_finalizers: list[weakref.finalize[Any, Any]] = []


def before_leaving(finalizer: weakref.finalize[Any, Any]) -> None:
    """Call this finalizer before the process group is destroyed, unless its object is gone by then."""
    _finalizers[:] = [earlier for earlier in _finalizers if earlier.alive]
    _finalizers.append(finalizer)


def run_finalizers() -> None:
    """Do all that is left; the caller is about to destroy the process group."""
    while _finalizers:
        with contextlib.suppress(Exception):  # the rank has its result, and its peers notice what they miss
            _finalizers.pop()()

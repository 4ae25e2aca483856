"""Pipes that nobody reads."""

from __future__ import annotations

import contextlib
import os


def fill(descriptor: int) -> None:
    """Write zeros until a pipe is full; then it blocks as any other."""
    os.set_blocking(descriptor, False)
    for size in (2**16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, bytes(size))
    os.set_blocking(descriptor, True)

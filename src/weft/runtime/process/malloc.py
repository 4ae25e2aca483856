"""Let the C library keep freed memory.

Every backward frees the activations of a micro-batch, and the next forward allocates as much again. In between, glibc
returns freed memory to the system, and then every page of it costs a page fault: several per cent of a step, and more
with more micro-batches in flight.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_KEPT = 2**30  # bytes; larger allocations are still mapped, and unmapped when they are freed
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """From now on; does nothing without glibc, or if the environment sets these thresholds or another allocator."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    if any(name in os.environ for name in USER_SETTINGS):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_memory() -> None:
    """Return all freed memory to the system, once: after something large has gone that never comes again."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)

"""What ranks tell the C library's allocator: to keep what is freed.

Every backward frees the activations of a micro-batch, and the next forward wants as much again. glibc gives freed
memory back to the system in between, and then every page of it costs a fault: several per cent of a step, and more the
more micro-batches are under way.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

TRIM, MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
LARGE = 2**30  # bytes: what is larger is mapped by itself all the same
OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> None:
    """From now on; whoever has chosen otherwise in the environment, or another allocator, is left alone."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in OWN):
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MAP, LARGE)
    libc.mallopt(TRIM, 2**31 - 1)

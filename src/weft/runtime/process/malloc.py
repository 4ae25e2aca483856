"""How the C library treats freed memory: blocks below 8 MiB are kept, larger ones are mapped one by one.

Every backward frees the activations of a micro-batch, and the next forward allocates as much again. By default glibc
returns freed memory to the system, and then every page of it costs a page fault: several per cent of a step. If it
keeps all freed memory instead, small blocks settle in the holes of large ones, which then fit no large block again: the
resident set grew to 1.6 times what was counted. So only small blocks are kept. Large blocks (gradients and versions of
wide layers, large activations) are mapped when they are allocated and unmapped when they are freed, and their pages are
huge ones (`THP_MEM_ALLOC_ENABLE` of PyTorch), so that a block costs few page faults.

All of it can be set while a process runs, so it is the same under torchrun.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_KEPT = 8 << 20  # bytes; larger blocks are mapped
MOST_KEPT = 128 << 20  # bytes at the end of the heap
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch reads it before its first allocation
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_in_force = "the system's"


def configure_malloc() -> None:
    """From now on; does nothing without glibc, or if the environment sets thresholds or another allocator."""
    global _in_force
    if not _has_glibc():
        return
    if given := [name for name in USER_SETTINGS if name in os.environ]:
        _in_force = f"the user's ({', '.join(given)})"
        return
    os.environ.setdefault(HUGE_PAGES, "1")
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
    _in_force = "weft's"


def malloc_settings() -> str:
    """Whose settings are in force in this process: weft's, the user's or the system's."""
    return _in_force


def give_back_memory() -> None:
    """Return all freed memory to the system, once: after something large has gone that never comes again."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

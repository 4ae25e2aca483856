"""How the C library treats freed memory: blocks below 8 MiB are kept, larger ones are mapped one by one.

Every backward frees the activations of a micro-batch, and the next forward allocates as much again. By default glibc
returns freed memory to the system, and then every page of it costs a page fault: several per cent of a step. If it
keeps all freed memory instead, small blocks settle in the holes of large ones, which then fit no large block again: the
resident set grew to 1.6 times what was counted. So only small blocks are kept. Large blocks (gradients and versions of
wide layers, large activations) are mapped when they are allocated and unmapped when they are freed, and their pages are
huge ones, so that a block costs few page faults.

The thresholds can be set while a process runs. Huge pages are a tunable of glibc, which a process reads when it starts:
`launch` sets it for its ranks. Under torchrun it is too late, and PyTorch's own `THP_MEM_ALLOC_ENABLE` has to do. It
also aligns blocks of 2 MiB and more to pages; then glibc 2.36 does not fit a freed block to the next request of its
size, and large activations take up to a fifth more memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST_KEPT = 8 << 20  # bytes; larger blocks are mapped
MOST_KEPT = 128 << 20  # bytes at the end of the heap
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"  # since glibc 2.35
HUGE_PAGES_OF_TORCH = "THP_MEM_ALLOC_ENABLE"  # PyTorch reads it before its first allocation
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", TUNABLES, "LD_PRELOAD")

_in_force = "the system's"


def set_malloc_variables(environment: MutableMapping[str, str]) -> None:
    """For a process that is about to start: huge pages, unless the user has settings of their own."""
    if _glibc() >= (2, 35) and not _user_settings(environment):
        environment[TUNABLES] = HUGE_PAGES


def configure_malloc() -> None:
    """From now on; does nothing without glibc, or if the environment sets thresholds or another allocator."""
    global _in_force
    if not _glibc():
        return
    if given := _user_settings(os.environ):
        _in_force = f"the user's ({', '.join(given)})"
        return
    if TUNABLES not in os.environ:
        os.environ.setdefault(HUGE_PAGES_OF_TORCH, "1")
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
    _in_force = "weft's"


def malloc_settings() -> str:
    """Whose settings are in force in this process: weft's, the user's or the system's."""
    return _in_force


def give_back_memory() -> None:
    """Return all freed memory to the system, once: after something large has gone that never comes again."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _user_settings(environment: Mapping[str, str]) -> list[str]:
    return [name for name in USER_SETTINGS if environment.get(name, HUGE_PAGES) != HUGE_PAGES]


def _glibc() -> tuple[int, ...]:
    """The version of glibc; empty on systems with another C library."""
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return ()
    return tuple(int(number) for number in (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[1].split(".")[:2])

"""Freed memory stays with its process, so reusing it causes no page faults."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from weft.runtime.process import malloc

glibc = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="configures the allocator of glibc"
)
SCRIPT = """
import resource, sys
import torch
from weft.runtime.process.malloc import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()

def step():
    tensors = [torch.ones(300_000) for _ in range(30)]  # of 1.2 MB each

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 30 * 1_200_000 // resource.getpagesize()  # per step


def faults(*arguments: str, **environment: str) -> int:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@glibc
def test_freed_memory_is_reused_without_page_faults() -> None:
    assert faults("keep") < PAGES  # in ten steps; the next test is the control


@glibc
def test_malloc_settings_of_the_user_are_kept() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 5 * PAGES


def test_nothing_happens_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    asked: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", asked.append)
    malloc.keep_freed_memory()
    assert not asked

"""Small freed blocks are reused without page faults; large ones go back to the system at once."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.helpers.scripts import SOURCES

from weft.runtime.process import malloc

glibc = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="configures the allocator of glibc"
)
SCRIPT = """
import resource, sys
import torch
from weft.runtime.process.malloc import configure_malloc

if "keep" in sys.argv:
    configure_malloc()

def step():
    tensors = [torch.ones(300_000) for _ in range(30)]  # of 1.2 MB each

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

if "large" in sys.argv:
    kept = [torch.ones(3_000_000) for _ in range(40)]  # of 12 MB each
    before = resident()
    small = []
    while len(kept) > 1:  # leave holes for small blocks, as gradients do that go while activations come
        kept.pop(0)
        small.append(torch.ones(30_000))
    print(before - resident())
    sys.exit()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 30 * 1_200_000 // resource.getpagesize()  # per step


def run(*arguments: str, **environment: str) -> int:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    known = {"PYTHONPATH": str(SOURCES)} | environment
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@glibc
def test_freed_memory_is_reused_without_page_faults() -> None:
    assert run("keep") < PAGES  # in ten steps; the next test is the control


@glibc
def test_large_blocks_go_back_to_the_system() -> None:
    assert run("keep", "large") > 0.9 * 39 * 12_000_000
    kept = {"MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_MMAP_THRESHOLD_": "1000000000"}
    assert run("keep", "large", **kept) < 39 * 12_000_000 / 2  # the control: as it was before


@glibc
def test_malloc_settings_of_the_user_are_kept() -> None:
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 5 * PAGES


@glibc
def test_started_ranks_get_huge_pages_unless_the_user_has_settings() -> None:
    environment: dict[str, str] = {}
    malloc.set_malloc_variables(environment)
    assert environment == ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if malloc._glibc() >= (2, 35) else {})
    for theirs in ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, {"LD_PRELOAD": "libjemalloc.so"}):
        environment = dict(theirs)
        malloc.set_malloc_variables(environment)
        assert environment == theirs


@glibc
@pytest.mark.parametrize(
    ("environment", "settings", "torch_pages"),
    [
        ({}, "weft's", "1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "weft's", None),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, "the user's (GLIBC_TUNABLES)", None),
    ],
)
def test_torch_makes_huge_pages_where_glibc_can_not(
    environment: dict[str, str], settings: str, torch_pages: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(environment))
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    monkeypatch.setattr(malloc, "_in_force", "")
    malloc.configure_malloc()
    assert malloc.malloc_settings() == settings
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == torch_pages


def test_nothing_happens_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.confstr_names", {})
    asked: list[object] = []
    monkeypatch.setattr("ctypes.CDLL", asked.append)
    malloc.configure_malloc()
    malloc.give_back_memory()
    environment: dict[str, str] = {}
    malloc.set_malloc_variables(environment)
    assert not asked
    assert not environment

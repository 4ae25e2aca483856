"""Ranks with a pretend device each, that stay up for the next test; see `Pool`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.pool import Pool
from tests.helpers.scripts import Starter

STANDIN = "pretend:standin,cpu:gloo"  # devices have a backend of their own, as with NCCL
STAGED = "gloo"  # what devices send is staged through host memory

needs_pretend_device = pytest.mark.skipif(pretend.unavailable() is not None, reason=str(pretend.unavailable()))


class PretendRanks:
    """`call` runs a function on all ranks. Only one number of ranks is up at a time, because machines are small."""

    def __init__(self, new_folder: Callable[[], Path], starter: Starter) -> None:
        self._new_folder, self._starter = new_folder, starter
        self._pool: Pool | None = None
        self._ranks = 0

    def call(self, fn: Callable[..., Any], *args: Any, ranks: int, backend: str = STANDIN) -> list[Any]:
        """The results of `fn(*args)` by rank, with a new default process group of this backend."""
        if self._ranks != ranks:
            self.end()
            pretend.build.build()
            self._pool, self._ranks = Pool(self._new_folder(), self._starter, ranks=ranks, prepare=load), ranks
        assert self._pool is not None
        try:
            return self._pool.call(run_with_device, fn, args, backend=backend)
        except BaseException:
            self._pool.kill()
            self._pool, self._ranks = None, 0
            raise

    def end(self) -> None:
        """Let the ranks return, and check that they do."""
        if self._pool is not None:
            self._pool.end()
        self._pool, self._ranks = None, 0


def load() -> None:
    """On a rank, once. The device of its number is the current one."""
    pretend.load()
    from tests.helpers.pretend import nccl

    nccl.register()
    torch.accelerator.set_device_index(dist.get_rank())


def run_with_device(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """On a rank: devices and communicators behave well again for the next function, however this one ends."""
    from tests.helpers.pretend import nccl

    try:
        return fn(*args)
    finally:
        gc.collect()
        nccl.reset()
        pretend.load().reset()

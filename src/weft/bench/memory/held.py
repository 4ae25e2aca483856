"""What a rank measures of itself: bytes by the engine's count, its resident set, and whether a batch fits a limit.

The limit is the kernel's own (RLIMIT_DATA, which counts heap and private mappings alike): an allocation beyond it
fails, as on a device that is full. glibc keeps what was freed in its arenas, so resident sets are noisy: here there is
one arena, and whatever is large is mapped by itself, and unmapped when it is freed.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import weft
from weft.bench.deadline import ends_within
from weft.bench.memory import bert
from weft.bench.memory.alone import chunk_bytes
from weft.bench.memory.bert import TINY, Size
from weft.bench.memory.search import Known, Search
from weft.bench.memory.trial import begin, told
from weft.errors import WeftError
from weft.runtime.comm import SHARED_MEMORY_SWITCH
from weft.schedule import METHODS

if TYPE_CHECKING:
    from weft.train.models import Net

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
MAPPED = 64 * 1024  # bytes from which on malloc maps an allocation by itself
DEADLINE = 600.0  # seconds without a message, on a slow machine
LONGEST = 1800.0  # seconds that a rank runs: several batches of a search


@ends_within(LONGEST)
def rank_cells(size: Size, methods: Sequence[str], microbatches: int, chunks: Sequence[int]) -> Any:
    """Run by every rank: what it holds under some methods; and what one of the numbers of chunks takes, each alone.

    That is in the same processes, for most of the time that it takes is torch's import.
    """
    _set_up()
    net = bert.build(size)
    makers = [Maker(size, method, recompute=False, microbatches=microbatches, net=net) for method in methods]
    held = [_held(maker) for maker in makers]
    return held, [chunk_bytes(size, count) for count in chunks[dist.get_rank() :: dist.get_world_size()]]


@ends_within(LONGEST)
def rank_memory(size: Size, method: str, recompute: bool, microbatches: int, known: Known, folder: str) -> Any:
    """Run by every rank: what it holds, and, where that is asked for, the batches that were tried.

    A batch that does not fit ends all ranks (see `trial`), and with them whatever a broken pipeline still holds.
    """
    _prepare(microbatches)
    maker = Maker(size, method, recompute=recompute, microbatches=microbatches)
    held = None if known else _held(maker)
    if (method, recompute) not in size.tried:
        return held, {}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, held)
    search = Search(step=microbatches, known=dict(known))
    while (samples := search.next()) is not None:
        if dist.get_rank() == 0:
            begin(Path(folder), {"held": every, "known": list(search.known.items()), "trying": samples})
        _try(maker, samples, Path(folder))
        search.known[samples] = True
    return held, search.known


class Maker:
    """Makes pipelines of one model, which is kept, for it takes long to make."""

    def __init__(self, size: Size, method: str, *, recompute: bool, microbatches: int, net: Net | None = None) -> None:
        self.size, self.recompute, self.net = size, recompute, net or bert.build(size)
        self.schedule = weft.schedule(method, stages=dist.get_world_size(), microbatches=microbatches)
        self.late = METHODS[method].asynchronous

    def make(self) -> weft.Pipeline:
        pipe = weft.Pipeline(
            copy.deepcopy(self.net.model),
            loss_fn=self.net.loss_fn,
            optimizer=bert.optimizer,
            schedule=self.schedule,
            balance=bert.balance(self.size, self.schedule.chunks),
            recompute=self.recompute,
            deadline=DEADLINE,
        )
        _let_go()
        return pipe

    def train(self, pipe: weft.Pipeline, samples: int) -> None:
        """Small mini-batches, so that states and versions are there; then large ones until the pipeline is full."""
        few = self.schedule.microbatches
        for much in (few, few, samples, samples) if self.late else (few, samples):
            pipe.step(*bert.batch(self.size, much))


def _set_up() -> None:
    torch.set_num_threads(1)
    os.environ[SHARED_MEMORY_SWITCH] = (
        "0"  # memory that is shared belongs to no rank, and no limit of a process counts it
    )
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MAPPED), (M_TRIM_THRESHOLD, MAPPED)):
        libc.mallopt(parameter, value)


def _prepare(microbatches: int) -> None:
    _set_up()
    maker = Maker(TINY, "1f1b", recompute=False, microbatches=microbatches)
    pipe = maker.make()
    maker.train(pipe, microbatches)  # loads what is loaded at the first use
    pipe.close()


def _held(maker: Maker) -> dict[str, Any]:
    """Bytes at the peak, counted by the engine, and the resident set beyond what it was without the pipeline."""
    _let_go()
    before = status("VmRSS")
    pipe = maker.make()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    begin = time.monotonic()
    maker.train(pipe, maker.size.batch)
    pipe.flush()
    seconds = time.monotonic() - begin
    resident = status("VmHWM") - before
    (meter,) = pipe.meters()
    buffers = pipe.report().ranks[dist.get_rank()]["bytes"]["buffers"]  # of messages, which a report alone counts
    pipe.close()
    counted = meter["bytes_at_peak"] | {"buffers": buffers}
    return {"counted": counted, "resident": resident, "seconds": seconds}


def _try(maker: Maker, samples: int, folder: Path) -> None:
    """Train with such a batch within the limit; where that fails for any rank, it does for all."""
    pipe = maker.make()
    others = status("VmData") - pipe.report().ranks[dist.get_rank()]["bytes"]["weights"]  # stacks of threads among them
    with told(folder, dist.get_rank()):
        with _limit(others + maker.size.limit):
            maker.train(pipe, samples)
        pipe.close()
    del pipe
    _let_go()


@contextlib.contextmanager
def _limit(nbytes: int) -> Iterator[None]:
    """Let no allocation take this process beyond so many bytes of data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _let_go() -> None:
    """Give back to the system what nothing holds any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise WeftError(f"/proc/self/status has no {field}; this benchmark needs Linux")

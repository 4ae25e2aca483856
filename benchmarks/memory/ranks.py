"""What each rank runs: it measures its bytes by the engine's count, its resident set, and whether a batch fits a limit.

The limit is the kernel's (RLIMIT_DATA, which counts heap and private mappings): an allocation beyond it fails, as on a
full device. malloc has the settings of every rank of weft.
"""

from __future__ import annotations

import contextlib
import copy
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
from benchmarks.harness import exit_after, status
from benchmarks.memory.chunk_costs import chunk_costs
from benchmarks.memory.models import FORMS, TINY, Size, balance, build, make_batch, make_optimizer
from benchmarks.memory.search import Known, Search
from benchmarks.memory.trial import begin_trial, marks_failed_allocation
from weft.runtime.comm import SHARED_MEMORY_SWITCH
from weft.runtime.process import give_back_memory
from weft.schedule import METHODS

if TYPE_CHECKING:
    from weft.train.models import Net

DEADLINE = 600.0  # seconds without a message, on a slow machine
RANK_TIMEOUT = 1800.0  # seconds that a rank runs: several batches of a search


@exit_after(RANK_TIMEOUT)
def measure_methods(size: Size, methods: Sequence[str], microbatches: int, chunks: Sequence[int]) -> Any:
    """This rank's memory under each method, and the costs of its share of the numbers of chunks.

    Both in the same processes, as importing torch takes longest.
    """
    _set_up()
    net = build(size)
    trainers = [Trainer(size, method, "", microbatches=microbatches, net=net) for method in methods]
    memory = [_memory(trainer) for trainer in trainers]
    return memory, [chunk_costs(size, count) for count in chunks[dist.get_rank() :: dist.get_world_size()]]


@exit_after(RANK_TIMEOUT)
def measure_rank(size: Size, method: str, form: str, microbatches: int, known: Known, folder: str) -> Any:
    """This rank's memory, and the batches that were tried, if the largest is searched.

    A batch that does not fit ends all ranks (see `trial.py`), and so frees what a broken pipeline still holds.
    """
    _prepare(microbatches)
    trainer = Trainer(size, method, form, microbatches=microbatches)
    memory = None if known else _memory(trainer)
    if not size.tried:
        return memory, {}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, memory)
    search = Search(step=microbatches, known=dict(known))
    while (samples := search.next()) is not None:
        if dist.get_rank() == 0:
            begin_trial(Path(folder), {"held": every, "known": list(search.known.items()), "trying": samples})
        _try(trainer, samples, Path(folder))
        search.known[samples] = True
    return memory, search.known


class Trainer:
    """Makes pipelines of one model."""

    def __init__(self, size: Size, method: str, form: str, *, microbatches: int, net: Net | None = None) -> None:
        self.size, self.form, self.net = size, FORMS[form], net or build(size)
        self.schedule = weft.schedule(method, stages=dist.get_world_size(), microbatches=microbatches)
        self.asynchronous = METHODS[method].asynchronous

    def make(self) -> weft.Pipeline:
        pipe = weft.Pipeline(
            copy.deepcopy(self.net.model),
            loss_fn=self.net.loss_fn,
            optimizer=make_optimizer,
            schedule=self.schedule,
            balance=balance(self.size, self.schedule.chunks),
            deadline=DEADLINE,
            **self.form,
        )
        _release_memory()
        return pipe

    def train(self, pipe: weft.Pipeline, samples: int) -> None:
        """Small mini-batches, to create states and versions; then large ones until the pipeline is full."""
        few = self.schedule.microbatches
        for count in (few, few, samples, samples) if self.asynchronous else (few, samples):
            pipe.step(*make_batch(self.size, count))


def _set_up() -> None:
    torch.set_num_threads(1)
    os.environ[SHARED_MEMORY_SWITCH] = "0"  # shared memory belongs to no rank, and no limit of a process counts it


def _prepare(microbatches: int) -> None:
    _set_up()
    trainer = Trainer(TINY, "1f1b", "", microbatches=microbatches)
    pipe = trainer.make()
    trainer.train(pipe, microbatches)  # loads what torch loads at first use
    pipe.close()


def _memory(trainer: Trainer) -> dict[str, Any]:
    """Bytes at the peak, counted by the engine, and the resident set minus that without the pipeline."""
    _release_memory()
    before = status("VmRSS")
    pipe = trainer.make()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    begin = time.monotonic()
    trainer.train(pipe, trainer.size.batch)
    pipe.flush()
    seconds = time.monotonic() - begin
    resident = status("VmHWM") - before
    (meter,) = pipe.meters()
    buffers = pipe.report().ranks[dist.get_rank()]["bytes"]["buffers"]  # of messages, which only a report counts
    pipe.close()
    counted = meter["bytes_at_peak"] | {"buffers": buffers}
    return {"counted": counted, "resident": resident, "seconds": seconds}


def _try(trainer: Trainer, samples: int, folder: Path) -> None:
    """Train with this batch within the limit; if that fails for one rank, it fails for all."""
    pipe = trainer.make()
    held = pipe.report().ranks[dist.get_rank()]["bytes"]
    others = status("VmData") - held["weights"] - held["masters"]  # includes stacks of threads
    with marks_failed_allocation(folder, dist.get_rank()):
        with _limit(others + trainer.size.limit):
            trainer.train(pipe, samples)
        pipe.close()
    del pipe
    _release_memory()


@contextlib.contextmanager
def _limit(nbytes: int) -> Iterator[None]:
    """Let allocations fail that take this process beyond this many bytes of data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _release_memory() -> None:
    """Return freed memory to the system."""
    gc.collect()
    give_back_memory()

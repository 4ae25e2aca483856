"""The largest GPT that trains within a limit of memory a rank, from a folder of safetensors to an exported one.

A trial has few updates of short sequences. It fits if no allocation fails under the kernel's limit on data and no
resident set, with the empty process and the shared memory of messages, was above the limit. Resident sets grow linearly
with the layers, so two small trials say where to look.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness import START_TIMEOUT, ResumeCache
from benchmarks.large.models import Size, write_folder
from benchmarks.large.ranks import measure_rank
from weft.errors import RunError, one_line
from weft.schedule import METHODS

CONTESTANTS = ("1f1b", "wpipe", "torch 1F1B", "FSDP2")
UPDATES = 3
FULL = re.compile(r"can't allocate memory|not enough memory|bad_alloc|MemoryError|Cannot allocate memory|SIGABRT")
Trial = dict[str, Any]  # fits, peak (bytes; 0 if an allocation failed), seconds, why


@dataclass(kw_only=True)
class Search:
    """Trials so far, by number of layers; all are multiples of `step`."""

    step: int
    limit: int
    trials: dict[int, Trial] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The most layers that fit; 0 if none do."""
        return max((layers for layers, trial in self.trials.items() if trial["fits"]), default=0)

    def next(self) -> int | None:
        """The number of layers to try next; None when the largest is known."""
        refused = min((layers for layers, trial in self.trials.items() if not trial["fits"]), default=0)
        if self.largest + self.step == refused:
            return None
        known = sorted((layers, trial["peak"]) for layers, trial in self.trials.items() if trial["fits"])
        if len(known) < 2:
            return self.largest + self.step if refused else 2 * self.largest or 2 * self.step
        (few, low), (many, high) = known[-2:]
        slope = max(1.0, (high - low) / (many - few))
        guess = int(many + (self.limit - high) / slope) // self.step * self.step
        lowest, highest = self.largest + self.step, refused - self.step if refused else guess
        return max(lowest, min(guess, highest))


def largest(name: str, size: Size, *, ranks: int, limit: int, cache: ResumeCache) -> dict[str, Any]:
    """The largest model of this width, and all trials."""
    search = Search(step=max(1, ranks // 2), limit=limit)
    while (layers := search.next()) is not None:
        tried = replace(size, layers=layers)
        part = f"headline, {ranks} ranks: {name}, {layers} layers"
        search.trials[layers] = cache(part, partial(run_trial, name, tried, ranks, limit))
        cache.log(f"{part}: {search.trials[layers]}")
    found = search.largest
    parameters = replace(size, layers=found).parameters if found else 0
    return {"layers": found, "parameters": parameters, "trials": sorted(search.trials.items())}


def run_trial(name: str, size: Size, ranks: int, limit: int) -> Trial:
    """One model under the limit."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights")
        write_folder(size, weights)
        arguments: tuple[Any, ...] = (name, size, {}, max(ranks, 2), UPDATES, folder, str(weights), limit)
        with malloc_of(name):
            return judged(limit, lambda: weft.launch(measure_rank, *arguments, ranks=ranks, timeout=START_TIMEOUT))


@contextlib.contextmanager
def malloc_of(name: str) -> Iterator[None]:
    """Each contestant has the allocator that its users have: weft's settings are weft's only.

    Any value of this variable keeps weft from changing malloc; this one is glibc's default.
    """
    variable = "GLIBC_TUNABLES"
    if name in METHODS:
        yield
        return
    os.environ[variable] = "glibc.malloc.arena_test=8"
    try:
        yield
    finally:
        del os.environ[variable]


def judged(limit: int, run: Callable[[], list[dict[str, Any]]]) -> Trial:
    """Whether a run stayed within the limit; an error that is no failed allocation is raised."""
    try:
        measured = run()
    except RunError as problem:
        if not FULL.search(str(problem)):
            raise
        return {"fits": False, "peak": 0, "seconds": {}, "why": one_line(problem)[:200]}
    peak = max(rank["empty"] + max(rank["peaks"].values()) for rank in measured)
    return {"fits": peak <= limit, "peak": peak, "seconds": measured[0]["seconds"], "why": ""}

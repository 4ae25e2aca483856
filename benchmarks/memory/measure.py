"""Run every method on real ranks, and simulate it with the costs of chunks that run alone."""

from __future__ import annotations

import platform
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness import ResumeCache, schedule_named
from benchmarks.memory.chunk_costs import chunk_costs
from benchmarks.memory.models import BASE, METHODS, SIMULATED, SMALL, TINY, Size, linear
from benchmarks.memory.pages import label_of
from benchmarks.memory.ranks import measure_methods, measure_rank
from benchmarks.memory.search import Known, Search, largest_of
from benchmarks.memory.trial import failed_trial
from weft.errors import RunError, WeftError
from weft.simulate import ChunkCost, Cost, RankMemory, simulate

QUICK = ("1f1b", "2bw", "wpipe")
MEASURED = {"small": SMALL, "base": BASE}
START_TIMEOUT = 600.0  # seconds for all ranks to start
LARGEST = 4096  # samples of the largest simulated batch


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Bytes of every method with and without recompute, on real ranks and simulated."""
    if (found := platform.libc_ver()[0]) != "glibc" or sys.platform != "linux":
        raise WeftError(f"this benchmark needs Linux with glibc (here: {sys.platform}, {found or 'another libc'})")
    if quick:
        return {"stages": 2, "microbatches": 2, "models": {"tiny": _quick(2)}}
    models = {name: _whole(name, size, 4, cache) for name, size in MEASURED.items()}
    return {"stages": 4, "microbatches": 4, "models": models}


def _whole(name: str, size: Size, stages: int, cache: ResumeCache) -> dict[str, Any]:
    costs = {}
    for count in (stages, 2 * stages):
        costs[count] = cache(f"{name}: {count} chunks alone", partial(chunk_costs, size, count))
    cells = []
    for method, recompute in product(METHODS, (False, True)):
        cell = cache(f"{name}: {label_of(method, recompute)}", partial(_run, size, method, recompute, stages))
        cells.append(cell | _simulated(size, costs[_chunks(method, stages)], method, recompute, stages))
    simulated = [
        {"method": method, "recompute": recompute, "ranks": _peaks(costs, size, method, recompute, stages)}
        for recompute in (False, True)
        for method in SIMULATED
        if not (recompute and method == "paci")  # which can't recompute
    ]
    return {"size": asdict(size), "cells": cells, "simulated": simulated}


def _peaks(
    costs: dict[int, list[dict[str, Any]]], size: Size, method: str, recompute: bool, stages: int
) -> list[dict[str, float]]:
    """Simulated bytes of each rank with twice as many micro-batches as stages, which weave needs."""
    schedule = schedule_named(method, stages, 2 * stages)
    return [rank.apart_from_messages for rank in _memory(costs[schedule.chunks], schedule, recompute, size.batch)]


def _quick(stages: int) -> dict[str, Any]:
    """A tiny model, one start of the ranks for all methods, no search."""
    counts = (stages, 2 * stages)  # chunks
    ranks = weft.launch(measure_methods, TINY, QUICK, stages, counts, ranks=stages, timeout=START_TIMEOUT)
    costs = {count: ranks[place % stages][1][place // stages] for place, count in enumerate(counts)}
    cells = []
    for place, method in enumerate(QUICK):
        cell = {"method": method, "recompute": False, "ranks": [memory[place] for memory, _ in ranks], "tried": []}
        cells.append(cell | _simulated(TINY, costs[_chunks(method, stages)], method, False, stages))
    return {"size": asdict(TINY), "cells": cells}


def _chunks(method: str, stages: int) -> int:
    return weft.schedule(method, stages=stages, microbatches=stages).chunks


def _run(size: Size, method: str, recompute: bool, stages: int) -> dict[str, Any]:
    """Memory of the ranks, and the batches that were tried: one that does not fit ends the ranks, and others start."""
    memory: list[Any] = []
    search = Search(step=stages)
    while not memory or ((method, recompute) in size.tried and search.next() is not None):
        found, search.known = _launch(size, method, recompute, stages, search.known)
        memory = memory or found
    tried = sorted([samples, fits] for samples, fits in search.known.items())
    return {"method": method, "recompute": recompute, "ranks": memory, "tried": tried}


def _launch(size: Size, method: str, recompute: bool, stages: int, known: Known) -> tuple[list[Any], Known]:
    """Memory of each rank (nothing if batches are known already), and all batches known now."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, method, recompute, stages, known, folder)
        try:
            ranks = weft.launch(measure_rank, *arguments, ranks=stages, timeout=START_TIMEOUT)
        except RunError:
            trial = failed_trial(Path(folder))
            if trial is None:
                raise
            return trial["held"], dict(trial["known"]) | {trial["trying"]: False}
    return [memory for memory, _ in ranks], ranks[0][1]


def _simulated(size: Size, costs: list[dict[str, Any]], method: str, recompute: bool, stages: int) -> dict[str, Any]:
    """Bytes of every rank for the measured batch, and the largest batches within the limits."""

    def fits(samples: int, *, limit: int) -> bool:
        if samples > LARGEST:
            return False
        return max(rank.total for rank in _memory(costs, schedule, recompute, samples)) <= limit

    schedule = weft.schedule(method, stages=stages, microbatches=stages)
    memory = _memory(costs, schedule, recompute, size.batch)
    return {
        "simulated": [rank.apart_from_messages for rank in memory],  # as the engine's meters count
        "simulated_largest": [largest_of(partial(fits, limit=limit), step=stages) for limit in size.limits],
    }


def _memory(
    costs: list[dict[str, Any]], schedule: weft.Schedule, recompute: bool, samples: int
) -> tuple[RankMemory, ...]:
    each = samples / schedule.microbatches
    chunks = tuple(
        ChunkCost(
            activation_bytes=linear(cost["activations"], each),
            input_bytes=linear(cost["input"], each),
            weight_bytes=cost["weights"],
            gradient_bytes=cost["gradients"],
            optimizer_bytes=cost["optimizer"],
            recompute=recompute,
        )
        for cost in costs
    )
    return simulate(schedule, Cost(chunks=chunks)).memory

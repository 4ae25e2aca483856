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
from benchmarks.memory.models import BASE, FORMS, METHODS, SIMULATED, SMALL, TINY, Size, linear
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
    """Bytes of every method in every form, on real ranks and simulated."""
    if (found := platform.libc_ver()[0]) != "glibc" or sys.platform != "linux":
        raise WeftError(f"this benchmark needs Linux with glibc (here: {sys.platform}, {found or 'another libc'})")
    if quick:
        return {"stages": 2, "microbatches": 2, "models": {"tiny": _quick(2)}}
    models = {name: _whole(name, size, 4, cache) for name, size in MEASURED.items()}
    return {"stages": 4, "microbatches": 4, "models": models}


def _whole(name: str, size: Size, stages: int, cache: ResumeCache) -> dict[str, Any]:
    costs = {}
    for count, precision in product((stages, 2 * stages), ("fp32", "bf16")):
        part = f"{name}: {count} chunks alone, {precision}"
        costs[count, precision] = cache(part, partial(chunk_costs, size, count, precision))
    cells = []
    for method, form in product(METHODS, FORMS):
        cell = cache(f"{name}: {label_of(method, form)}", partial(_run, size, method, form, stages))
        alone = costs[_chunks(method, stages), FORMS[form].get("precision", "fp32")]
        cells.append(cell | _simulated(size, alone, method, form, stages))
    simulated = [
        {"method": method, "form": form, "ranks": _peaks(costs, size, method, form, stages)}
        for form in ("", "recompute")
        for method in SIMULATED
        if not (form and method == "paci")  # which can't recompute
    ]
    return {"size": asdict(size), "cells": cells, "simulated": simulated}


def _peaks(
    costs: dict[tuple[int, str], list[dict[str, Any]]], size: Size, method: str, form: str, stages: int
) -> list[dict[str, float]]:
    """Simulated bytes of each rank with twice as many micro-batches as stages, which weave needs."""
    schedule = schedule_named(method, stages, 2 * stages)
    memory = _memory(costs[schedule.chunks, "fp32"], schedule, form, size.batch)
    return [rank.apart_from_messages for rank in memory]


def _quick(stages: int) -> dict[str, Any]:
    """A tiny model, one start of the ranks for all methods, no search."""
    counts = (stages, 2 * stages)  # chunks
    ranks = weft.launch(measure_methods, TINY, QUICK, stages, counts, ranks=stages, timeout=START_TIMEOUT)
    costs = {count: ranks[place % stages][1][place // stages] for place, count in enumerate(counts)}
    cells = []
    for place, method in enumerate(QUICK):
        cell = {"method": method, "form": "", "ranks": [memory[place] for memory, _ in ranks], "tried": []}
        cells.append(cell | _simulated(TINY, costs[_chunks(method, stages)], method, "", stages))
    return {"size": asdict(TINY), "cells": cells}


def _chunks(method: str, stages: int) -> int:
    return weft.schedule(method, stages=stages, microbatches=stages).chunks


def _run(size: Size, method: str, form: str, stages: int) -> dict[str, Any]:
    """Memory of the ranks, and the batches that were tried: one that does not fit ends the ranks, and others start."""
    memory: list[Any] = []
    search = Search(step=stages)
    while not memory or (size.tried and search.next() is not None):
        found, search.known = _launch(size, method, form, stages, search.known)
        memory = memory or found
    tried = sorted([samples, fits] for samples, fits in search.known.items())
    return {"method": method, "form": form, "ranks": memory, "tried": tried}


def _launch(size: Size, method: str, form: str, stages: int, known: Known) -> tuple[list[Any], Known]:
    """Memory of each rank (nothing if batches are known already), and all batches known now."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, method, form, stages, known, folder)
        try:
            ranks = weft.launch(measure_rank, *arguments, ranks=stages, timeout=START_TIMEOUT)
        except RunError:
            trial = failed_trial(Path(folder))
            if trial is None:
                raise
            return trial["held"], dict(trial["known"]) | {trial["trying"]: False}
    return [memory for memory, _ in ranks], ranks[0][1]


def _simulated(size: Size, costs: list[dict[str, Any]], method: str, form: str, stages: int) -> dict[str, Any]:
    """Bytes of every rank for the measured batch, and the largest batches within the limits."""

    def fits(samples: int, *, limit: int) -> bool:
        if samples > LARGEST:
            return False
        return max(rank.total for rank in _memory(costs, schedule, form, samples)) <= limit

    schedule = weft.schedule(method, stages=stages, microbatches=stages)
    memory = _memory(costs, schedule, form, size.batch)
    return {
        "simulated": [rank.apart_from_messages for rank in memory],  # as the engine's meters count
        "simulated_largest": [largest_of(partial(fits, limit=limit), step=stages) for limit in size.limits],
    }


def _memory(costs: list[dict[str, Any]], schedule: weft.Schedule, form: str, samples: int) -> tuple[RankMemory, ...]:
    each = samples / schedule.microbatches
    recompute = FORMS[form].get("recompute", False)
    by_layer = recompute == "layer"
    chunks = tuple(
        ChunkCost(
            activation_bytes=linear(cost["activations"], each),
            input_bytes=linear(cost["input"], each),
            weight_bytes=cost["weights"],
            gradient_bytes=cost["gradients"],
            optimizer_bytes=cost["optimizer"],
            master_bytes=cost["masters"],
            recompute=recompute,
            kept_bytes=linear(cost["kept"], each) if by_layer else None,
            rebuilt_bytes=linear(cost["rebuilt"], each) if by_layer else None,
        )
        for cost in costs
    )
    return simulate(schedule, Cost(chunks=chunks)).memory

"""Bytes of activations that each rank holds at its peak: counted by the engine, and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from benchmarks.contenders import make_optimizer, transformer
from benchmarks.harness import schedule_named
from benchmarks.memory.chunk_costs import run_chunk
from weft import Pipeline
from weft.schedule import Schedule
from weft.simulate import ChunkCost, Cost, simulate

MINIBATCHES = 3  # until the pipeline is full


def held_bytes(names: Sequence[str], *, stages: int) -> dict[str, dict[str, list[float]]]:
    """Of each rank under each schedule, on virtual ranks: two encoder layers a rank, two micro-batches a rank."""
    return {name: _held(schedule_named(name, stages, 2 * stages)) for name in names}


def _held(schedule: Schedule) -> dict[str, list[float]]:
    task = transformer(layers=2 * schedule.stages, width=32, tokens=16, samples=2)
    size = 2 * schedule.stages // schedule.chunks
    with Pipeline(
        task.model(),
        loss_fn=task.loss_fn,
        optimizer=make_optimizer,
        schedule=schedule,
        stages=schedule.stages,
        balance=[size] * schedule.chunks,
    ) as pipe:
        for _ in range(MINIBATCHES):
            pipe.step(*task.batch(schedule.microbatches))
        counted = [float(rank["peak_bytes"]["activations"]) for rank in pipe.report().ranks]
    layers = list(task.model())
    chunks = [nn.Sequential(*layers[first : first + size]) for first in range(0, len(layers), size)]
    inputs, targets = task.batch(1)
    costs, value = [], inputs
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        kept, given, value = run_chunk(chunk, value, task.loss_fn if last else None, targets if last else None)
        costs.append(_activations_only(kept, given))
    memory = simulate(schedule, Cost(chunks=tuple(costs))).memory
    return {"counted": counted, "simulated": [rank.apart_from_messages["activations"] for rank in memory]}


def _activations_only(kept: int, given: int) -> ChunkCost:
    no_weights: dict[str, Any] = dict.fromkeys(("weight_bytes", "gradient_bytes", "optimizer_bytes"), 0.0)
    return ChunkCost(activation_bytes=float(kept), input_bytes=float(given), **no_weights)

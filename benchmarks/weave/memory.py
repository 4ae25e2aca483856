"""Bytes of activations that each rank holds at its peak: counted by the engine, and simulated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import weft
from benchmarks.contenders import Task, make_optimizer, transformer
from benchmarks.harness import schedule_named
from benchmarks.memory.chunk_costs import run_chunk
from weft.schedule import Schedule
from weft.simulate import ChunkCost, Cost, simulate

MINIBATCHES = 3  # until the pipeline is full


def held_bytes(names: Sequence[str], *, stages: int) -> dict[str, dict[str, list[float]]]:
    """Of each rank under each schedule, on virtual ranks: two encoder layers a rank, two micro-batches a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers are tiny
    try:
        return {name: _held(schedule_named(name, stages, 2 * stages)) for name in names}
    finally:
        torch.set_num_threads(threads)


def _held(schedule: Schedule) -> dict[str, list[float]]:
    task = transformer(layers=2 * schedule.stages, width=32, tokens=16, samples=2)
    size = 2 * schedule.stages // schedule.chunks
    layers = list(task.model())
    chunks = [nn.Sequential(*layers[first : first + size]) for first in range(0, len(layers), size)]
    alone = weft.schedule("zb-h1", stages=schedule.chunks, microbatches=1)
    inputs, targets = task.batch(1)
    costs, value = [], inputs
    for number, (chunk, deferred) in enumerate(zip(chunks, _counted(task, alone), strict=True)):
        last = number == len(chunks) - 1
        kept, given, value = run_chunk(chunk, value, task.loss_fn if last else None, targets if last else None)
        costs.append(
            ChunkCost(
                activation_bytes=float(kept),
                input_bytes=float(given),
                deferred_bytes=deferred,
                weight_bytes=0.0,
                gradient_bytes=0.0,
                optimizer_bytes=0.0,
            )
        )
    memory = simulate(schedule, Cost(chunks=tuple(costs))).memory
    simulated = [rank.apart_from_messages["activations"] for rank in memory]
    return {"counted": _counted(task, schedule), "simulated": simulated}


def _counted(task: Task, schedule: Schedule) -> list[float]:
    """The engine's count on each rank.

    If each rank has one chunk and one micro-batch, it is what this micro-batch holds, also between the halves of its
    backward: layers that compute the gradients of their weights later keep the gradients of their outputs.
    """
    size = len(task.model()) // schedule.chunks
    with weft.Pipeline(
        task.model(),
        loss_fn=task.loss_fn,
        optimizer=make_optimizer,
        schedule=schedule,
        stages=schedule.stages,
        balance=[size] * schedule.chunks,
    ) as pipe:
        for _ in range(MINIBATCHES):
            pipe.step(*task.batch(schedule.microbatches))
        return [float(rank["peak_bytes"]["activations"]) for rank in pipe.report().ranks]

"""One run on two real ranks: how fast it is, then a training of as many updates as fit into the time."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from weft.runtime import Pipeline
from weft.train.job import job_of
from weft.train.setup import RankData, collectives_of, net_of, open_rank_data, pipeline_of

FILL = 20  # updates before the pace is measured


def run(sets: list[str], seconds: float, timed: int) -> dict[str, Any]:
    """Updates, seconds, idle time and held-out results of a job; the pace is measured over `timed` updates."""
    job = job_of(None, sets)
    supply = open_rank_data(job, collectives_of(job))
    updates = max(1, round(seconds / _pace(supply, timed)))
    pipe = _pipeline(supply, updates)
    begin = time.perf_counter()
    _train(pipe, supply, range(updates))
    pipe.flush()
    took = time.perf_counter() - begin
    bubbles = [rank["bubble"] for rank in pipe.report().ranks]
    metrics = net_of(job, supply.spec).metrics or {}
    found = pipe.evaluate(supply.held_out(), metrics=metrics)
    pipe.close()
    return {"updates": updates, "seconds": took, "bubble": sum(bubbles) / len(bubbles), **found}


def _pace(supply: RankData, timed: int) -> float:
    """Seconds of an update, the same on all ranks."""
    pipe = _pipeline(supply, FILL + timed)
    _train(pipe, supply, range(FILL))
    begin = time.perf_counter()
    _train(pipe, supply, range(FILL, FILL + timed))
    pace = torch.tensor((time.perf_counter() - begin) / timed, dtype=torch.float64)
    pipe.close()
    dist.all_reduce(pace)
    return float(pace) / dist.get_world_size()


def _pipeline(supply: RankData, updates: int) -> Pipeline:
    return pipeline_of(supply.job, net_of(supply.job, supply.spec), supply.spec, updates=updates)


def _train(pipe: Pipeline, supply: RankData, updates: range) -> None:
    for update in updates:
        batch = supply.batch(update)
        pipe.step(batch.inputs, batch.targets)

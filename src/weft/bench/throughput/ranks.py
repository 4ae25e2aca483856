"""What each of the two ranks runs: contenders in windows that take turns, and the limit in between.

In every round each contender has one window, in an order that is shuffled from round to round. The limit, this rank's
half of the layers without any pipeline while the other rank computes its own, has a window before every few of them and
one at the end, so that each contender is compared with what the cores could do just before and after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.bench import peers
from weft.bench.contender import Contender, check_first_update, first_update, pipeline, turns
from weft.bench.deadline import BUILD, ends_within
from weft.bench.layers import SMALL, TASKS, Task, optimizer
from weft.bench.schedules import fits
from weft.bench.writing import version_of

WEFT = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "pipedream",
    "2bw",
    "2bw warmup 2",
    "wpipe",
    "wpipe warmup 2",
    "xpipe",
    "spectrain",
    "pipeoptim",
)
GROUP = 3  # contenders between two windows of the limit, each half as long as a contender's
FILL = 4  # micro-batches, at the least, before the time is taken
FEWEST = 2  # mini-batches of a window
SLOWER = 8  # times the limit's time: what no race takes, unless a rank is stuck
SLACK = 300.0  # seconds, on top: a machine may be busy with other things for a while


@dataclass(frozen=True)
class Job:
    """What the ranks are to run."""

    model: str
    microbatches: int
    rounds: int = field(kw_only=True)
    window: float = field(kw_only=True)  # seconds, of a contender as fast as the limit
    small: bool = field(kw_only=True, default=False)


def work(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What each job finds on this rank."""
    return [_job(job) for job in jobs]


def _job(job: Job) -> dict[str, Any]:
    task, microbatches = (SMALL if job.small else TASKS)[job.model], job.microbatches
    with ends_within(BUILD):
        limit = alone(task, microbatches)
        contenders = built(task, microbatches)
        expected = first_update(task, microbatches)
        for name, one in contenders.items():
            check_first_update(name, one, expected)
        took = _slower(min(_timed(limit.step) for _ in range(3)))
    return race(job, contenders, limit, took)


def race(job: Job, contenders: Mapping[str, Contender], limit: Contender, took: float) -> dict[str, Any]:
    """Seconds a micro-batch on this rank, in each round: of all windows of the limit, and of each contender.

    A mini-batch of the limit takes `took` seconds, and windows and the deadline are by that. Closes the contenders.
    """
    steps = max(FEWEST, round(job.window / took))
    windows = len(contenders) + -(-len(contenders) // GROUP) + 1
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    limits: list[list[float]] = []
    with ends_within(SLACK + SLOWER * (_fill(job.microbatches) + steps) * took * windows * job.rounds):
        for number in range(job.rounds):
            limits.append([])
            for place, name in enumerate(turns(contenders, number)):
                if place % GROUP == 0:
                    limits[-1].append(_window(limit, -(-steps // 2), job.microbatches))
                seconds[name].append(_window(contenders[name], steps, job.microbatches))
            limits[-1].append(_window(limit, -(-steps // 2), job.microbatches))
        for one in contenders.values():
            one.close()
    return {"steps": steps, "limit": limits, "seconds": seconds}


def together(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all ranks found, of each job: the slower rank's time, of contenders as of the limit beside them.

    A cut is given, so that no pipeline is faster than its slower half. The mean of both is kept as well.
    """
    return [_joined(both) for both in zip(*ranks, strict=True)]


def _joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = list(ranks[0]["seconds"])
    rounds = [list(zip(*windows, strict=True)) for windows in zip(*(rank["limit"] for rank in ranks), strict=True)]
    return {
        "steps": ranks[0]["steps"],
        "limit": _beside(names, [[max(window) for window in windows] for windows in rounds]),
        "mean": _beside(names, [[statistics.fmean(window) for window in windows] for windows in rounds]),
        "seconds": {
            name: [max(one) for one in zip(*(rank["seconds"][name] for rank in ranks), strict=True)] for name in names
        },
    }


def _beside(names: Sequence[str], rounds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Of each contender in each round: the mean of the windows of the limit before and after its group."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number, windows in enumerate(rounds):
        for place, name in enumerate(turns(names, number)):
            before = place // GROUP
            found[name].append((windows[before] + windows[before + 1]) / 2)
    return found


def built(task: Task, microbatches: int) -> dict[str, Contender]:
    """All contenders that take so many micro-batches, in the same order on every rank."""
    ranks = dist.get_world_size()
    made = {
        f"weft {name}": pipeline(name, task, microbatches, stages=ranks)
        for name in WEFT
        if fits(name, ranks, microbatches)
    }
    made |= {
        f"torch {name}": peers.torch_pipeline(name, task, microbatches)
        for name, peer in peers.PIPELINES.items()
        if microbatches >= peer.fewest * ranks
    }
    made |= {"DDP": peers.ddp(task, microbatches), "FSDP2": peers.fsdp2(task, microbatches)}
    if version_of("deepspeed"):
        made["DeepSpeed"] = peers.deepspeed_pipeline(task, microbatches)
    return made


def alone(task: Task, microbatches: int) -> Contender:
    """This rank's share of the layers: its forwards, backwards and updates, and nothing to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, last = task.model(), rank == ranks - 1
    size = len(model) // ranks
    mine = model[rank * size : (rank + 1) * size]
    inputs, targets = task.batch(microbatches)
    with torch.no_grad():
        pieces = [model[: rank * size](piece) for piece in inputs.chunk(microbatches)]
        gradient = torch.randn_like(mine(pieces[0]))
    update = optimizer(mine.parameters())

    def step() -> None:
        for piece, target in zip(pieces, targets.chunk(microbatches), strict=True):
            output = mine(piece.detach().requires_grad_(rank > 0))
            if last:
                torch.autograd.backward([task.loss_fn(output, target) / microbatches])
            else:
                torch.autograd.backward([output], [gradient])
        update.step()
        update.zero_grad()

    return Contender(step=step, weights=lambda: dict(mine.named_parameters()))


def _slower(seconds: float) -> float:
    """The slower rank's, on every rank."""
    took = torch.tensor(seconds)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _fill(microbatches: int) -> int:
    """Mini-batches before the time is taken."""
    return max(1, FILL // microbatches)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _window(contender: Contender, steps: int, microbatches: int) -> float:
    """Seconds a micro-batch, from a pipeline that is full and a core that is warm; drained afterwards."""
    dist.barrier()
    for _ in range(_fill(microbatches)):
        contender.step()
    took = sum(_timed(contender.step) for _ in range(steps))
    contender.flush()
    return took / (steps * microbatches)

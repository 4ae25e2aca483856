"""What each of the two ranks runs: contenders in windows that take turns, and the limit in between.

In every round each contender has one window, in an order that is rotated from round to round. The limit, this rank's
half of the layers without any pipeline while the other rank computes its own, has several windows in each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.bench import peers
from weft.bench.contender import Contender, check_first_update, first_update, pipeline
from weft.bench.deadline import ends_within
from weft.bench.layers import SMALL, TASKS, Task, optimizer
from weft.bench.schedules import fits

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
LIMITS = 4  # windows of the limit in a round, each half as long as a contender's
BUILD = 400.0  # seconds that nobody needs to build all contenders, on a machine that is busy with other things
WINDOWS = 30 * 6  # more contenders than there are, each six times slower than the limit
FILL = 4  # micro-batches, at the least, before the time is taken


@dataclass(frozen=True)
class Job:
    """What the ranks are to run."""

    model: str
    microbatches: int
    rounds: int = field(kw_only=True)
    window: float = field(kw_only=True)  # seconds, of a contender as fast as the limit
    small: bool = field(kw_only=True, default=False)

    @property
    def deadline(self) -> float:
        """Seconds that it never takes, unless a rank is stuck."""
        return BUILD + WINDOWS * self.rounds * self.window


def work(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What each job finds on this rank."""
    found = []
    for job in jobs:
        with ends_within(job.deadline):
            found.append(_race(job))
    return found


def _race(job: Job) -> dict[str, Any]:
    """Seconds a micro-batch on this rank: of the limit, all windows of each round; of each contender, a round each."""
    task, microbatches = (SMALL if job.small else TASKS)[job.model], job.microbatches
    limit = alone(task, microbatches)
    contenders = built(task, microbatches)
    expected = first_update(task, microbatches)
    for name, one in contenders.items():
        check_first_update(name, one, expected)
    steps = _steps(limit, job.window)
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    limits: list[list[float]] = []
    for number in range(job.rounds):
        first = number * len(names) // job.rounds
        limits.append([])
        for place, name in enumerate(names[first:] + names[:first]):
            if place % -(-len(names) // LIMITS) == 0:
                limits[-1].append(_window(limit, -(-steps // 2), microbatches))
            seconds[name].append(_window(contenders[name], steps, microbatches))
    return {"steps": steps, "limit": limits, "seconds": seconds}


def together(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all ranks found, of each job: of a contender the slowest rank's time, of the limit all ranks' mean."""
    return [_joined(both) for both in zip(*ranks, strict=True)]


def _joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "steps": ranks[0]["steps"],
        "limit": [
            [sum(window) / len(window) for window in zip(*windows, strict=True)]
            for windows in zip(*(rank["limit"] for rank in ranks), strict=True)
        ],
        "seconds": {
            name: [max(one) for one in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
            for name in ranks[0]["seconds"]
        },
    }


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
    if peers.has_deepspeed():
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


def _steps(limit: Contender, window: float) -> int:
    """Mini-batches of a window: as many as the limit makes in its time, on the slower rank."""
    took = torch.tensor(min(_timed(limit.step) for _ in range(3)))
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(1, round(window / float(took)))


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _window(contender: Contender, steps: int, microbatches: int) -> float:
    """Seconds a micro-batch, from a pipeline that is full and a core that is warm; drained afterwards."""
    dist.barrier()
    for _ in range(max(1, FILL // microbatches)):
        contender.step()
    took = sum(_timed(contender.step) for _ in range(steps))
    contender.flush()
    return took / (steps * microbatches)

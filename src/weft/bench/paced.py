"""What each rank of many-stages runs: pipelines of layers that sleep, in windows that take turns.

Asynchronous pipelines are left full from window to window, so that each of theirs begins with one mini-batch that is
not timed; a synchronous one begins and ends empty. The order of windows is shuffled from round to round.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from weft.bench.contender import Contender, check_first_update, first_update, pipeline, turns
from weft.bench.deadline import BUILD, ends_within
from weft.bench.layers import Paced, Task
from weft.bench.peers import torch_pipeline
from weft.schedule import METHODS

FILL = 3  # mini-batches of an asynchronous pipeline before the first window
STEPS = 2  # mini-batches of a window of an asynchronous pipeline


@dataclass(frozen=True, kw_only=True)
class Job:
    """Layers that sleep so long in their forwards and backwards, and who runs them."""

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    rounds: int
    weft: dict[str, int]  # micro-batches by schedule
    peers: dict[str, int]

    @property
    def deadline(self) -> float:
        """Seconds that it never takes, unless a rank is stuck: four times as long as one mini-batch after another."""
        stages = len(self.forwards) // 2
        stage = 2 * (max(self.forwards) + max(self.backwards))
        minibatches = (len(self.weft) + len(self.peers)) * (1 + FILL + (1 + STEPS) * self.rounds)
        most = max((*self.weft.values(), *self.peers.values()))
        return BUILD + 4 * minibatches * (most + stages) * stage


def work(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Of each job: seconds of a mini-batch of each contender in each round, on this rank, and torch's own orders."""
    found = []
    for job in jobs:
        with ends_within(job.deadline):
            found.append(_job(job))
    return found


def _job(job: Job) -> dict[str, Any]:
    task, ranks = _task(job.forwards, job.backwards), dist.get_world_size()
    quiet = _task([0.0] * len(job.forwards), [0.0] * len(job.forwards))
    contenders = {f"weft {name}": pipeline(name, task, m, stages=ranks) for name, m in job.weft.items()}
    contenders |= {f"torch {name}": torch_pipeline(name, task, m) for name, m in job.peers.items()}
    endless = [f"weft {name}" for name in job.weft if METHODS[name.split()[0]].asynchronous]
    for (name, one), m in zip(contenders.items(), (*job.weft.values(), *job.peers.values()), strict=True):
        check_first_update(name, one, first_update(quiet, m))
    orders = {name: one.order for name, one in contenders.items() if one.order}
    return {"seconds": race(contenders, endless, job.rounds), "orders": orders}


def race(contenders: Mapping[str, Contender], endless: Collection[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of a mini-batch of each contender in each round; `endless` ones are kept full. Closes them all."""
    for name in endless:
        for _ in range(FILL):
            contenders[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in turns(contenders, number):
            seconds[name].append(_window(contenders[name], endless=name in endless))
    for one in contenders.values():
        one.close()
    return seconds


def _window(contender: Contender, *, endless: bool) -> float:
    """Seconds of a mini-batch."""
    dist.barrier()
    steps = STEPS if endless else 1
    if endless:
        contender.step()
    begin = time.perf_counter()
    for _ in range(steps):
        contender.step()
    return (time.perf_counter() - begin) / steps


def _task(forwards: Sequence[float], backwards: Sequence[float]) -> Task:
    return Task(
        layers=lambda: [Paced(forward=f, backward=b) for f, b in zip(forwards, backwards, strict=True)],
        microbatch=lambda count: (torch.randn(count, 4), torch.randn(count, 4)),
        samples=1,
        loss_fn=functional.mse_loss,
    )

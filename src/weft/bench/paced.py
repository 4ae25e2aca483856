"""What each rank of many-stages runs: pipelines of layers that sleep, in windows that take turns.

Asynchronous pipelines are left full from window to window, so that each of theirs begins with one mini-batch that is
not timed; a synchronous one begins and ends empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from weft.bench.contender import Contender, check_first_update, first_update, pipeline
from weft.bench.deadline import ends_within
from weft.bench.layers import Paced, Task
from weft.bench.peers import torch_pipeline
from weft.schedule import METHODS

FILL = 2  # mini-batches of an asynchronous pipeline before the first window
STEPS = 2  # mini-batches of a window of an asynchronous pipeline
BUILD = 400.0  # seconds that nobody needs to build all contenders, on a machine that is busy with other things


@dataclass(frozen=True, kw_only=True)
class Job:
    """Layers that sleep so long in their forwards and backwards, and who runs them."""

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    microbatches: int
    rounds: int
    weft: tuple[str, ...]  # schedules
    peers: tuple[str, ...]

    @property
    def deadline(self) -> float:
        """Seconds that it never takes, unless a rank is stuck: four times as long as one mini-batch after another."""
        stages = len(self.forwards) // 2
        stage = 2 * (max(self.forwards) + max(self.backwards))
        minibatches = (len(self.weft) + len(self.peers)) * (1 + FILL + (1 + STEPS) * self.rounds)
        return BUILD + 4 * minibatches * (self.microbatches + stages) * stage


def work(jobs: Sequence[Job]) -> list[dict[str, list[float]]]:
    """Of each job: seconds of a mini-batch of each contender in each round, on this rank."""
    found = []
    for job in jobs:
        with ends_within(job.deadline):
            found.append(_race(job))
    return found


def _race(job: Job) -> dict[str, list[float]]:
    task, ranks, microbatches = _task(job.forwards, job.backwards), dist.get_world_size(), job.microbatches
    contenders = {f"weft {name}": pipeline(name, task, microbatches, stages=ranks) for name in job.weft}
    contenders |= {f"torch {name}": torch_pipeline(name, task, microbatches) for name in job.peers}
    endless = {f"weft {name}" for name in job.weft if METHODS[name.split()[0]].asynchronous}
    expected = first_update(_task([0.0] * len(job.forwards), [0.0] * len(job.forwards)), microbatches)
    for name, one in contenders.items():
        check_first_update(name, one, expected)
        for _ in range(FILL if name in endless else 0):
            one.step()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(job.rounds):
        first = number * len(names) // job.rounds
        for name in names[first:] + names[:first]:
            seconds[name].append(_window(contenders[name], endless=name in endless))
    for one in contenders.values():
        one.flush()
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

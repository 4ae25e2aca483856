"""What each rank runs: pipelines of layers that sleep, measured in windows that take turns.

Asynchronous pipelines stay full from window to window, so each of their windows begins with one mini-batch that is not
timed; a synchronous one begins and ends empty. The order of windows changes from round to round.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.contenders import (
    Contender,
    PacedLayer,
    Task,
    check_first_update,
    first_update,
    paced_links,
    pipeline,
    shuffled,
    torch_pipeline,
)
from benchmarks.harness import BUILD_TIMEOUT, exit_after
from weft.schedule import METHODS, read_csv

FILL = 3  # mini-batches of an asynchronous pipeline before the first window
STEPS = 2  # mini-batches of a window of an asynchronous pipeline


@dataclass(frozen=True, kw_only=True)
class Race:
    """The seconds of each layer's forward and backward, and the contenders."""

    forwards: tuple[float, ...]
    backwards: tuple[float, ...]
    rounds: int
    weft: dict[str, int]  # micro-batches by schedule
    torch: dict[str, int]
    orders: dict[str, str] = field(default_factory=dict)  # torch's, as CSV, which weft runs
    hop: float = 0.0  # seconds of a message, for contenders that weft runs

    @property
    def deadline(self) -> float:
        """Seconds that it takes only if a rank hangs: four times those of one mini-batch after another."""
        stages = len(self.forwards) // 2
        stage = 2 * (max(self.forwards) + max(self.backwards))
        minibatches = (len(self.weft) + len(self.torch) + len(self.orders)) * (1 + FILL + (1 + STEPS) * self.rounds)
        microbatches = max((*self.weft.values(), *self.torch.values()))
        return BUILD_TIMEOUT + 4 * minibatches * (microbatches + stages) * (stage + 4 * self.hop)


def run_races(races: Sequence[Race]) -> list[dict[str, Any]]:
    """For each race: the seconds of a mini-batch of each contender in each round on this rank, and torch's orders."""
    found = []
    for race in races:
        with exit_after(race.deadline), paced_links(race.hop) if race.hop else nullcontext():
            found.append(_run(race))
    return found


def _run(race: Race) -> dict[str, Any]:
    task, ranks = _task(race.forwards, race.backwards), dist.get_world_size()
    without_sleep = _task([0.0] * len(race.forwards), [0.0] * len(race.forwards))
    contenders = {f"weft {name}": pipeline(name, task, m, stages=ranks) for name, m in race.weft.items()}
    contenders |= {f"torch {name}": torch_pipeline(name, task, m) for name, m in race.torch.items()}
    ordered = {name: read_csv(order, name=name) for name, order in race.orders.items()}
    contenders |= {name: pipeline(order, task, order.microbatches, stages=ranks) for name, order in ordered.items()}
    asynchronous = [f"weft {name}" for name in race.weft if METHODS[name.split()[0]].asynchronous]
    sizes = (*race.weft.values(), *race.torch.values(), *(order.microbatches for order in ordered.values()))
    for (name, contender), m in zip(contenders.items(), sizes, strict=True):
        check_first_update(name, contender, first_update(without_sleep, m))
    orders = {name: contender.order for name, contender in contenders.items() if contender.order}
    return {"seconds": measure_windows(contenders, asynchronous, race.rounds), "orders": orders}


def measure_windows(
    contenders: Mapping[str, Contender], asynchronous: Collection[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a mini-batch of each contender in each round. Closes the contenders."""
    for name in asynchronous:
        for _ in range(FILL):
            contenders[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in shuffled(contenders, number):
            seconds[name].append(_window(contenders[name], asynchronous=name in asynchronous))
    for contender in contenders.values():
        contender.close()
    return seconds


def _window(contender: Contender, *, asynchronous: bool) -> float:
    """Seconds of a mini-batch."""
    dist.barrier()
    steps = STEPS if asynchronous else 1
    if asynchronous:
        contender.step()
    begin = time.perf_counter()
    for _ in range(steps):
        contender.step()
    return (time.perf_counter() - begin) / steps


def _task(forwards: Sequence[float], backwards: Sequence[float]) -> Task:
    return Task(
        layers=lambda: [PacedLayer(forward=f, backward=b) for f, b in zip(forwards, backwards, strict=True)],
        make_batch=lambda samples: (torch.randn(samples, 4), torch.randn(samples, 4)),
        samples=1,
        loss_fn=functional.mse_loss,
    )

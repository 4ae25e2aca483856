"""What an action costs on top of the same forwards and backwards in a plain loop: virtual ranks, small layers.

Schedules take turns in every round; the plain loop and weft's pipeline alternate in coming first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.contenders import make_optimizer
from weft import Pipeline
from weft.schedule import NONE, lower

SCHEDULES = ("1f1b", "2bw", "wpipe")
MICROBATCHES, STAGES, REPEATS = 8, 2, 10


class Pair(NamedTuple):
    """A mini-batch in a plain loop, and the same in a pipeline of this many actions."""

    plain: Callable[[], object]
    piped: Callable[[], object]
    actions: int
    close: Callable[[], object]


def action_costs(*, rounds: int) -> dict[str, list[float]]:
    """Microseconds that an action costs, in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = {name: _pair(name) for name in SCHEDULES}
        costs: dict[str, list[float]] = {name: [] for name in pairs}
        for _ in range(rounds):
            for name, pair in pairs.items():
                costs[name].append(_cost(pair))
        for pair in pairs.values():
            pair.close()
        return costs
    finally:
        torch.set_num_threads(threads)


def _pair(name: str) -> Pair:
    batch = torch.randn(MICROBATCHES, 4, 16)
    pipe = Pipeline(
        _model(), loss_fn=mse_loss, optimizer=make_optimizer, schedule=name, microbatches=MICROBATCHES, stages=STAGES
    )
    return Pair(
        plain=_plain_loop(_model(), pipe.balance, batch),
        piped=lambda: pipe.step(batch, batch),
        actions=int((lower(pipe.schedule).op != NONE).sum()),
        close=pipe.close,
    )


def _cost(pair: Pair) -> float:
    for _ in range(2):
        pair.plain()
        pair.piped()
    plain, piped = 0.0, 0.0
    for number in range(REPEATS):
        if number % 2:
            piped += _timed(pair.piped)
            plain += _timed(pair.plain)
        else:
            plain += _timed(pair.plain)
            piped += _timed(pair.piped)
    return (piped - plain) / REPEATS / pair.actions * 1e6


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(8)))


def _plain_loop(model: nn.Sequential, balance: tuple[int, ...], batch: Tensor) -> Callable[[], None]:
    """The same chunks, micro-batch by micro-batch, without versions, messages or meters."""
    ends = [sum(balance[: number + 1]) for number in range(len(balance))]
    chunks = [model[end - size : end] for size, end in zip(balance, ends, strict=True)]
    optimizers = [make_optimizer(chunk.parameters()) for chunk in chunks]

    def step() -> None:
        for piece in batch.chunk(MICROBATCHES):
            value, graph = piece, []
            for chunk in chunks:
                given = value.detach().requires_grad_(chunk is not chunks[0])
                value = chunk(given)
                graph.append((given, value))
            loss = mse_loss(value, piece)
            loss.item()
            torch.autograd.backward([loss], [torch.full_like(loss, 1 / MICROBATCHES)])
            for (given, _), (_, value) in zip(graph[:0:-1], graph[-2::-1], strict=True):
                torch.autograd.backward([value], [given.grad])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step

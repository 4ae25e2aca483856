"""What an action costs beyond the same forwards and backwards called by hand: virtual ranks, small layers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from weft.bench.layers import optimizer
from weft.runtime.pipeline import Pipeline
from weft.schedule import lower
from weft.schedule.actions import NONE

SCHEDULES = ("1f1b", "2bw", "wpipe")
MICROBATCHES, STAGES, REPEATS = 8, 2, 10


def engine(*, rounds: int) -> dict[str, list[float]]:
    """Microseconds that an action costs, in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _cost(name, rounds) for name in SCHEDULES}
    finally:
        torch.set_num_threads(threads)


def _cost(name: str, rounds: int) -> list[float]:
    batch = torch.randn(MICROBATCHES, 4, 16)
    pipe = Pipeline(
        _model(), loss_fn=mse_loss, optimizer=optimizer, schedule=name, microbatches=MICROBATCHES, stages=STAGES
    )
    actions = int((lower(pipe.schedule).op != NONE).sum())
    by_hand = _by_hand(_model(), pipe.balance, batch)
    costs = []
    for _ in range(rounds):
        for _ in range(2):
            by_hand()
            pipe.step(batch, batch)
        mine, its = 0.0, 0.0
        for _ in range(REPEATS):
            begin = time.perf_counter()
            by_hand()
            middle = time.perf_counter()
            pipe.step(batch, batch)
            mine, its = mine + middle - begin, its + time.perf_counter() - middle
        costs.append((its - mine) / REPEATS / actions * 1e6)
    return costs


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(8)))


def _by_hand(model: nn.Sequential, balance: tuple[int, ...], batch: Tensor) -> Callable[[], None]:
    """The same chunks, micro-batch by micro-batch, without versions, messages or meters."""
    ends = [sum(balance[: number + 1]) for number in range(len(balance))]
    chunks = [model[end - size : end] for size, end in zip(balance, ends, strict=True)]
    updates = [optimizer(chunk.parameters()) for chunk in chunks]

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
        for update in updates:
            update.step()
            update.zero_grad()

    return step

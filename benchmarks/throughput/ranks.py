"""What each of the two ranks runs: contenders in windows that take turns, and the limit in between.

In every round each contender has one window, in an order that changes from round to round. The limit is this rank's
half of the layers without any pipeline, while the other rank computes its own half. It has a window before every few
contenders and one at the end, so that each contender is compared with what the cores could do just before and after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import (
    SMALL_TASKS,
    TASKS,
    TORCH_PIPELINES,
    Contender,
    Task,
    check_first_update,
    ddp,
    deepspeed_pipeline,
    first_update,
    fsdp2,
    make_optimizer,
    pipeline,
    shuffled,
    torch_pipeline,
)
from benchmarks.harness import BUILD_TIMEOUT, exit_after, fits, installed_version

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
GROUP = 3  # contenders between two windows of the limit, which are half as long as a contender's
FILL = 4  # micro-batches, at the least, before the timer starts
MIN_STEPS = 2  # mini-batches of a window
SLOWER = 8  # times the limit's time: a race takes longer only if a rank hangs
SLACK = 300.0  # seconds on top, for a busy machine


@dataclass(frozen=True)
class Race:
    """What the ranks run."""

    model: str
    microbatches: int
    rounds: int = field(kw_only=True)
    window: float = field(kw_only=True)  # seconds of a contender that is as fast as the limit
    small: bool = field(kw_only=True, default=False)
    names: tuple[str, ...] | None = field(kw_only=True, default=None)  # of contenders; None: all


def run_races(races: Sequence[Race]) -> list[dict[str, Any]]:
    """What each race measures on this rank."""
    return [_run(race) for race in races]


def _run(race: Race) -> dict[str, Any]:
    task, microbatches = (SMALL_TASKS if race.small else TASKS)[race.model], race.microbatches
    with exit_after(BUILD_TIMEOUT):
        limit = half_alone(task, microbatches)
        contenders = (
            build_contenders(task, microbatches) if race.names is None else _chosen(race.names, task, microbatches)
        )
        expected = first_update(task, microbatches)
        for name, contender in contenders.items():
            check_first_update(name, contender, expected)
        limit_seconds = _slower(min(_timed(limit.step) for _ in range(3)))
    return measure_windows(race, contenders, limit, limit_seconds)


def measure_windows(
    race: Race, contenders: Mapping[str, Contender], limit: Contender, limit_seconds: float
) -> dict[str, Any]:
    """Seconds a micro-batch on this rank, in each round: of all windows of the limit, and of each contender.

    A mini-batch of the limit takes `limit_seconds`, from which windows and deadline follow. Closes the contenders.
    """
    steps = max(MIN_STEPS, round(race.window / limit_seconds))
    windows = len(contenders) + -(-len(contenders) // GROUP) + 1
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    limits: list[list[float]] = []
    with exit_after(SLACK + SLOWER * (_fill(race.microbatches) + steps) * limit_seconds * windows * race.rounds):
        for number in range(race.rounds):
            limits.append([])
            for place, name in enumerate(shuffled(contenders, number)):
                if place % GROUP == 0:
                    limits[-1].append(_window(limit, -(-steps // 2), race.microbatches))
                seconds[name].append(_window(contenders[name], steps, race.microbatches))
            limits[-1].append(_window(limit, -(-steps // 2), race.microbatches))
        for contender in contenders.values():
            contender.close()
    return {"steps": steps, "limit": limits, "seconds": seconds}


def join_ranks(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all ranks, race by race: the slower rank's time, of contenders and of the limit beside them.

    The cut is fixed, so that no pipeline is faster than its slower half. The mean of both ranks is kept as well.
    """
    return [_join(both) for both in zip(*ranks, strict=True)]


def _join(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = list(ranks[0]["seconds"])
    rounds = [list(zip(*windows, strict=True)) for windows in zip(*(rank["limit"] for rank in ranks), strict=True)]
    return {
        "steps": ranks[0]["steps"],
        "limit": _beside(names, [[max(window) for window in windows] for windows in rounds]),
        "mean": _beside(names, [[statistics.fmean(window) for window in windows] for windows in rounds]),
        "seconds": {
            name: [max(times) for times in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
            for name in names
        },
    }


def _beside(names: Sequence[str], rounds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """For each contender in each round: the mean of the limit's windows before and after its group."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number, windows in enumerate(rounds):
        for place, name in enumerate(shuffled(names, number)):
            before = place // GROUP
            found[name].append((windows[before] + windows[before + 1]) / 2)
    return found


def build_contenders(task: Task, microbatches: int) -> dict[str, Contender]:
    """All contenders that support this many micro-batches, in the same order on every rank."""
    ranks = dist.get_world_size()
    contenders = {
        f"weft {name}": pipeline(name, task, microbatches, stages=ranks)
        for name in WEFT
        if fits(name, ranks, microbatches)
    }
    contenders |= {
        f"torch {name}": torch_pipeline(name, task, microbatches)
        for name, schedule in TORCH_PIPELINES.items()
        if microbatches >= schedule.min_microbatches * ranks
    }
    contenders |= {"DDP": ddp(task, microbatches), "FSDP2": fsdp2(task, microbatches)}
    if installed_version("deepspeed"):
        contenders["DeepSpeed"] = deepspeed_pipeline(task, microbatches)
    return contenders


def _chosen(names: Sequence[str], task: Task, microbatches: int) -> dict[str, Contender]:
    """Contenders by their names in the tables, such as weft 2bw or torch 1F1B."""
    return {
        name: pipeline(method, task, microbatches, stages=dist.get_world_size())
        if library == "weft"
        else torch_pipeline(method, task, microbatches)
        for name in names
        for library, _, method in [name.partition(" ")]
    }


def half_alone(task: Task, microbatches: int) -> Contender:
    """This rank's share of the layers: forwards, backwards and updates without communication."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, last = task.model(), rank == ranks - 1
    size = len(model) // ranks
    share = model[rank * size : (rank + 1) * size]
    inputs, targets = task.batch(microbatches)
    with torch.no_grad():
        pieces = [model[: rank * size](piece) for piece in inputs.chunk(microbatches)]
        gradient = torch.randn_like(share(pieces[0]))
    optimizer = make_optimizer(share.parameters())

    def step() -> None:
        for piece, target in zip(pieces, targets.chunk(microbatches), strict=True):
            output = share(piece.detach().requires_grad_(rank > 0))
            if last:
                torch.autograd.backward([task.loss_fn(output, target) / microbatches])
            else:
                torch.autograd.backward([output], [gradient])
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step=step, weights=lambda: dict(share.named_parameters()))


def _slower(seconds: float) -> float:
    """The time of the slower rank, on every rank."""
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _fill(microbatches: int) -> int:
    """Mini-batches before the timer starts."""
    return max(1, FILL // microbatches)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _window(contender: Contender, steps: int, microbatches: int) -> float:
    """Seconds a micro-batch of a full pipeline on a warm core; flushes afterwards."""
    dist.barrier()
    for _ in range(_fill(microbatches)):
        contender.step()
    seconds = sum(_timed(contender.step) for _ in range(steps))
    contender.flush()
    return seconds / (steps * microbatches)

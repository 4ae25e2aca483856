"""Measure every contender on 4 and 8 ranks, and simulate it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, Results, ResumeCache, schedule_named
from benchmarks.many_stages.pages import WARM
from benchmarks.many_stages.ranks import Race, run_races
from weft import launch
from weft.schedule import Schedule, read_csv
from weft.simulate import ChunkCost, Cost, Link, simulate

FORWARD, BACKWARD = 0.020, 0.040  # seconds, of a layer
SLOW = 1.5
STAGES = (4, 8)
ROUNDS = 4
WEFT = ("gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe")
TORCH = {  # with weft's schedule of the same order; where there is none, torch's own order is simulated
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": None,
}

Paces = list[tuple[float, float]]  # seconds of forward and backward of each layer


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Seconds of a mini-batch of every contender in every round, and the simulated seconds."""
    stages = STAGES[:1] if quick else STAGES
    return {"stages": {str(p): cache(f"{p} stages", partial(_measure, p, quick=quick)) for p in stages}}


def _measure(stages: int, *, quick: bool) -> dict[str, Any]:
    rounds, shrink = (3, 0.25) if quick else (ROUNDS, 1.0)
    kinds = {"even": 1.0} if quick else {"even": 1.0, "uneven": SLOW}
    paces = {kind: paces_of(stages, slow, shrink) for kind, slow in kinds.items()}
    races = [
        Race(
            forwards=tuple(forward for forward, _ in pace),
            backwards=tuple(backward for _, backward in pace),
            rounds=rounds,
            weft=weft_schedules(stages),
            torch=dict.fromkeys(TORCH, stages),
        )
        for pace in paces.values()
    ]
    ranks = launch(run_races, races, ranks=stages, threads=1, timeout=START_TIMEOUT)
    return {
        kind: {"simulated": simulated(pace, stages, by_rank[0]["orders"]), "seconds": slowest(by_rank)}
        for (kind, pace), by_rank in zip(paces.items(), zip(*ranks, strict=True), strict=True)
    }


def paces_of(stages: int, slow: float, shrink: float) -> Paces:
    """The layers of the middle stage take `slow` times as long as the others."""
    factors = [shrink * (slow if layer // 2 == stages // 2 else 1.0) for layer in range(2 * stages)]
    return [(FORWARD * factor, BACKWARD * factor) for factor in factors]


def weft_schedules(stages: int) -> dict[str, int]:
    """Micro-batches by schedule."""
    return dict.fromkeys(WEFT, stages) | dict.fromkeys(WARM, 2 * stages)


def slowest(ranks: Sequence[Results]) -> dict[str, list[float]]:
    seconds = [rank["seconds"] for rank in ranks]
    return {name: [max(times) for times in zip(*(rank[name] for rank in seconds), strict=True)] for name in seconds[0]}


def simulated(paces: Paces, stages: int, orders: Mapping[str, str]) -> dict[str, float]:
    """Simulated seconds of a mini-batch of each contender; `orders` are torch's own, as CSV."""
    schedules = {f"weft {name}": schedule_named(name, stages, m) for name, m in weft_schedules(stages).items()}
    for name, order in TORCH.items():
        key = f"torch {name}"
        schedules[key] = schedule_named(order, stages, stages) if order else read_csv(orders[key], name=key)
    return {contender: period(schedule, paces) for contender, schedule in schedules.items()}


def period(schedule: Schedule, paces: Paces, hop: float = 0.0) -> float:
    """Simulated seconds of a mini-batch."""
    size = len(paces) // schedule.chunks
    costs = []
    for first in range(0, len(paces), size):
        chunk = paces[first : first + size]
        of_input = sum(backward / 2 for _, backward in chunk)
        if first == 0:  # the model's input has no gradient: all of the first layer's backward is for its weight
            of_input -= chunk[0][1] / 2
        backward = sum(backward for _, backward in chunk)
        forward = sum(forward for forward, _ in chunk)
        costs.append(ChunkCost(forward=forward, backward_input=of_input, backward_weight=backward - of_input))
    return simulate(schedule, Cost(chunks=tuple(costs), link=Link(latency=hop))).period

"""An independent computation of times, in plain Python: it shares no code with the executor or the lowering.

It reads a schedule's streams, placement and number of micro-batches, and nothing that weft derives from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from weft.schedule import Schedule
from weft.simulate import ChunkCost, Cost

OPS = "FBIWU"


class Key(NamedTuple):
    """An action; as text `2F0`."""

    op: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.op}{self.micro}"


class Span(NamedTuple):
    """When an action ran, and when its input arrived (None: it needs none)."""

    rank: int
    start: float
    end: float
    arrived: float | None


def order(schedule: Schedule, minibatches: int) -> list[list[Key]]:
    """The actions of each rank in a window, with updates after the backward that completes a mini-batch."""
    m, ranks = schedule.microbatches, []
    for stream in schedule.streams:
        rows = [Key(OPS[op], chunk, index) for op, chunk, index in stream.tolist()]
        written = {key.chunk for key in rows if key.op == "U"}
        reach = max((-(key.micro if key.op == "U" else key.micro // m) for key in rows), default=0)
        run: list[Key] = []
        retired: Counter[tuple[int, int]] = Counter()
        for cycle in range(minibatches + max(0, reach)):
            for op, chunk, index in rows:
                key = Key(op, chunk, index + cycle * (1 if op == "U" else m))
                batch = key.micro if op == "U" else key.micro // m
                if not 0 <= batch < minibatches:
                    continue
                run.append(key)
                retired[chunk, batch] += op in "BW"
                if op in "BW" and chunk not in written and retired[chunk, batch] == m:
                    run.append(Key("U", chunk, batch))
        ranks.append(run)
    return ranks


def duration(cost: ChunkCost, op: str) -> float:
    recomputed = cost.forward if cost.recompute else 0.0
    times = {"F": cost.forward, "W": cost.backward_weight, "U": cost.update, "I": recomputed + cost.backward_input}
    return times["I"] + times["W"] if op == "B" else times[op]


def spans(
    schedule: Schedule, cost: Cost, minibatches: int, *, stalls: Mapping[Key, float] | None = None
) -> dict[Key, Span]:
    """Start and end of every action of a window, by running each rank as far as possible.

    `stalls` are actions that take longer than their cost.
    """
    todo = [iter(run) for run in order(schedule, minibatches)]
    heads = [next(run, None) for run in todo]
    clock, free = [0.0] * schedule.stages, dict[tuple[int, int], float]()
    arrived, done = dict[tuple[bool, int, int], float](), dict[Key, Span]()  # (backward, receiver, micro) -> time
    last, moved = schedule.chunks - 1, True
    while moved:
        moved = False
        for rank in range(schedule.stages):
            while (key := heads[rank]) is not None:
                op, chunk, micro = key
                needs = (op == "F" and chunk > 0) or (op in "BI" and chunk < last)
                when = arrived.get((op in "BI", chunk, micro)) if needs else None
                if needs and when is None:
                    break
                start = clock[rank] if when is None else max(clock[rank], when)
                end = clock[rank] = start + duration(cost.chunks[chunk], op) + (stalls or {}).get(key, 0.0)
                done[key] = Span(rank, start, end, when)
                heads[rank], moved = next(todo[rank], None), True
                receiver = chunk + 1 if op == "F" else chunk - 1
                if op not in "FBI" or not 0 <= receiver <= last:
                    continue
                pair = (rank, schedule.placement[receiver])
                arrival = end
                if pair[0] != pair[1]:
                    link = cost.links.get(pair, cost.link)
                    size = cost.chunks[max(chunk, receiver)].input_bytes
                    free[pair] = max(end, free.get(pair, 0.0)) + size / link.bandwidth
                    arrival = free[pair] + link.latency
                    clock[rank] = clock[rank] if link.overlap else arrival
                arrived[op != "F", receiver, micro] = arrival
    assert heads == [None] * schedule.stages, "the oracle's run is stuck"
    return done

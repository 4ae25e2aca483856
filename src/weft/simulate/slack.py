"""Slack: how much later messages may be, or a rank for a moment, before the pipeline becomes slower.

Both figures are exact. Every loop of waits (`event_graph.py`) that contains messages tolerates that each of them takes
longer by `(pace * cycles - time) / messages`, at the pace of the pipeline; the loop that tolerates least decides.
Newton's method finds it: the slowest loop under a delay that is too large tolerates less, and its tolerance is the
next delay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.schedule import Program, Schedule, lower
from weft.simulate.cost import Cost
from weft.simulate.event_graph import TOLERANCE, EventGraph, Loop

MAX_EVENTS = 100_000  # actions and messages of a cycle: more would take seconds
MAX_EVENTS_OF_RANKS = 200_000  # the same, times the ranks: each has a search of its own


@dataclass(frozen=True, kw_only=True)
class Slack:
    """Times in the unit of the costs; infinite if there is no message.

    `messages`: all messages may take this much longer, always, and the time of a mini-batch stays the same.
    `ranks`: the same if only the messages of one rank are later. So a rank may fall this far behind the others before
    they have to wait for it. None: there are too many actions to compute it.
    """

    messages: float
    ranks: tuple[float, ...] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; null stands for an infinite slack, too."""
        ranks = None if self.ranks is None else [_finite(time) for time in self.ranks]
        return {"messages": _finite(self.messages), "ranks": ranks}


def slack(schedule: Schedule, cost: Cost | None = None) -> Slack | None:
    """The slack of a schedule with costs (default: equal stages, F = 1, B = 2); None: it has too many actions."""
    cost = cost or Cost.uniform(schedule)
    cost.check(schedule)
    events = 2 * sum(map(len, schedule.streams))  # actions and messages, at most
    if events > MAX_EVENTS:
        return None
    program = lower(schedule)
    graph = EventGraph.of(program, cost)
    slowest = graph.slowest_loop(graph.time)
    ranks = None
    if events * schedule.stages <= MAX_EVENTS_OF_RANKS:
        ranks = tuple(_tolerated(program, graph, slowest, graph.sender == rank) for rank in range(schedule.stages))
    return Slack(messages=_tolerated(program, graph, slowest, graph.sender >= 0), ranks=ranks)


def _tolerated(program: Program, graph: EventGraph, slowest: Loop, late: npt.NDArray[np.bool_]) -> float:
    """How much longer the `late` waits may take at the pace of the slowest loop."""
    if not late.any():
        return math.inf
    if not slowest.pace:
        return 0.0
    loop, delay = slowest, slowest.pace / program.schedule.microbatches
    most = slowest.pace * (program.drain + 2)  # the loop of a forward and its backward on neighbours spans no more
    while (loop := graph.slowest_loop(graph.time + delay * late, loop.latest)).pace <= slowest.pace * (1 + TOLERANCE):
        if delay > most:
            return math.inf
        delay *= 4
    while loop.pace > slowest.pace * (1 + TOLERANCE):
        waits = loop.latest[loop.events], loop.events
        spare = slowest.pace * float(graph.cycles[waits].sum()) - float(graph.time[waits].sum())
        delay = spare / int(late[waits].sum())
        if delay < slowest.pace * TOLERANCE:
            return 0.0
        loop = graph.slowest_loop(graph.time + delay * late, loop.latest)
    return delay


def _finite(time: float) -> float | None:
    return None if time == math.inf else time

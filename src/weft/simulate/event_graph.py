"""The steady state of a pipeline as a graph of events that wait for each other.

An *event* is the start of an action, or the moment when a link begins to send a message. It happens when everything
that it waits for has happened:

    an action   waits for the previous action of its rank, and for its message
    a message   waits for the action that makes it, and for the previous message of its link

So every event has two waits; an action without a message has the same one twice. (Where actions need the norm of all
gradients of the previous cycle, further events join the ends of the ranks' cycles.) A wait takes `time`, and what it
waits for may belong to an earlier mini-batch, `cycles` ago. Waits form loops. A loop that takes `time` and spans
`cycles` mini-batches allows at most one mini-batch per `time / cycles`: the slowest loop sets the pace.

`slowest_loop` is Howard's algorithm: assume for every event which of its two waits ends last, compute when all events
happen under this assumption, and correct it where the other wait ends later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.schedule import BACKWARDS, NONE, Op, Program, is_any
from weft.simulate.cost import Cost, action_durations, message_bytes
from weft.simulate.executor import Floats, Ints, rows_after_norm

TOLERANCE = 1e-10  # of times, relative to the time of a mini-batch


class Loop(NamedTuple):
    """A closed path of waits: its events, and for every event of the graph, which of its waits ends last."""

    events: Ints
    latest: Ints
    pace: float  # time per mini-batch


@dataclass(frozen=True, kw_only=True, eq=False)
class EventGraph:
    """The events of one cycle. All tables have two lines, one for each wait of an event."""

    source: Ints  # the event that is waited for
    time: Floats
    cycles: Ints
    sender: Ints  # the rank whose message is waited for, or -1

    @classmethod
    def of(cls, program: Program, cost: Cost) -> EventGraph:
        actions = _Actions.of(program, cost)
        messages = _Messages.of(program, cost, actions)
        count, rank = len(actions.rank), actions.rank[messages.maker]
        before, wraps = _previous(actions.rank)
        sent_before, link_wraps = _previous(rank * program.schedule.stages + actions.rank[messages.taker])
        number = count + np.arange(len(rank))  # of the messages among the events
        nobody = np.full(count + len(rank), -1)
        graph = cls(
            source=np.stack([np.append(before, messages.maker), np.append(before, number[sent_before])]),
            time=actions.duration[np.stack([np.append(before, messages.maker)] * 2)],
            cycles=np.stack([np.append(wraps, 0 * number), np.append(wraps, link_wraps)]),
            sender=np.stack([nobody, nobody]),
        )
        graph.time[1, count:] = messages.transfer[sent_before]
        blocking = np.flatnonzero(messages.blocks)  # the next action of the sender waits for its arrival, too
        after = np.empty_like(before)
        after[before] = np.arange(count)
        blocked = after[messages.maker[blocking]]
        everyone = np.arange(len(rank))
        for line, events, what in ((0, blocked, blocking), (1, blocked, blocking), (1, messages.taker, everyone)):
            graph.source[line, events] = number[what]
            graph.time[line, events] = (messages.transfer + messages.latency)[what]
            graph.sender[line, events] = rank[what]
        graph.cycles[1, messages.taker] = messages.cycles
        needing_norm = rows_after_norm(program)
        return graph if needing_norm is None else graph._with_norm(actions.rank, needing_norm[program.op != NONE])

    def _with_norm(self, rank: Ints, after: npt.NDArray[np.bool_]) -> EventGraph:
        """The first of the actions `after` the norm of each rank waits until all ranks have ended the cycle before.

        Each rank has an event for the end of its cycle, which also waits for that of the rank before it, and one that
        waits for the last of them and takes over what the action has waited for besides its message.
        """
        firsts = np.unique(rank, return_index=True)[1]
        waiting = np.flatnonzero(after)[np.unique(rank[after], return_index=True)[1]]
        old, ranks = self.source.shape[1], len(firsts)
        ends = old + np.arange(ranks)
        gates = old + ranks + np.arange(len(waiting))

        def extended(table: npt.NDArray[Any], of_ends: Any, of_gates: Any) -> npt.NDArray[Any]:
            first_line = np.concatenate([table[0], table[0, firsts], table[0, waiting]])
            return np.stack([first_line, np.concatenate([table[1], of_ends, of_gates])])

        nobody, none = np.full(ranks, -1), np.zeros(ranks, np.int64)
        count = np.ones(len(waiting), np.int64)
        graph = EventGraph(
            source=extended(self.source, np.append(ends[:1], ends[:-1]), ends[-1] * count),
            time=extended(self.time, 0.0 * none, 0.0 * count),
            cycles=extended(self.cycles, none, count),
            sender=extended(self.sender, nobody, -count),
        )
        graph.cycles[0, ends] -= 1  # the end of a cycle, not the start of the next
        for table in (graph.source, graph.time, graph.cycles, graph.sender):
            table[1, ends[0]] = table[0, ends[0]]
        graph.source[0, waiting], graph.time[0, waiting] = gates, 0.0
        graph.cycles[0, waiting], graph.sender[0, waiting] = 0, -1
        return graph

    def slowest_loop(self, time: Floats, latest: Ints | None = None) -> Loop:
        """The loop that sets the pace if waits take this `time`; `latest` is a guess."""
        events = np.arange(self.source.shape[1])
        latest = np.zeros_like(events) if latest is None else latest
        while True:
            before, spent, cycles = self.source[latest, events], time[latest, events], self.cycles[latest, events]
            anchor = _anchors(before)
            is_anchor = anchor == events
            duration, distance = _sums(np.where(is_anchor, events, before), spent, cycles, stop=is_anchor)
            anchors = np.flatnonzero(is_anchor)
            paces = (spent + duration[before])[anchors] / (cycles + distance[before])[anchors]
            pace = np.empty(len(events))
            pace[anchors] = paces
            pace = pace[anchor]
            tolerance = TOLERANCE * paces.max()
            other = 1 - latest
            source = self.source[other, events]
            slower = pace[source] > pace + tolerance
            if not slower.any():
                happens = duration - pace * distance  # relative to the anchor, at this pace
                ends = happens[source] + time[other, events] - pace * self.cycles[other, events]
                slower = (ends > happens + tolerance) & (pace[source] >= pace - tolerance)
            if not slower.any():
                return Loop(_loop_of(int(anchors[paces.argmax()]), before), latest, float(paces.max()))
            latest = np.where(slower, other, latest)


class _Actions(NamedTuple):
    """The actions of one cycle, rank by rank in their order."""

    rank: Ints
    op: Ints
    chunk: Ints
    microbatch: Ints
    duration: Floats

    @classmethod
    def of(cls, program: Program, cost: Cost) -> _Actions:
        rank, row = np.nonzero(program.op != NONE)
        op, chunk, microbatch = (
            column[rank, row].astype(np.int64) for column in (program.op, program.chunk, program.index)
        )
        return cls(rank, op, chunk, microbatch, action_durations(cost)[op, chunk])


class _Messages(NamedTuple):
    """The messages of one cycle between ranks, in the order of the actions that make them."""

    maker: Ints
    taker: Ints
    cycles: Ints  # from the maker's cycle to the taker's
    transfer: Floats
    latency: Floats
    blocks: npt.NDArray[np.bool_]  # the sender computes nothing until the message has arrived

    @classmethod
    def of(cls, program: Program, cost: Cost, actions: _Actions) -> _Messages:
        m, placement = program.schedule.microbatches, np.array(program.schedule.placement)
        rank, op, chunk, microbatch, _ = actions
        gives, needs = program.feeds[op, chunk], program.needs[op, chunk]
        maker = np.flatnonzero((gives >= 0) & (placement[gives] != rank))
        taker = np.flatnonzero((needs >= 0) & (placement[needs] != rank))

        def key(events: Ints, chunks: Ints) -> Ints:
            backward = is_any(op[events].astype(np.int8), BACKWARDS)
            return (backward * len(placement) + chunks) * m + microbatch[events] % m

        by_maker = np.empty_like(maker)
        by_maker[key(maker, gives[maker]).argsort()] = taker[key(taker, chunk[taker]).argsort()]
        kinds, kind_of = np.unique(op[maker] * len(placement) + chunk[maker], return_inverse=True)
        links = [_transfer(program, cost, *divmod(kind, len(placement))) for kind in kinds.tolist()]
        transfer, latency, blocks = np.array(links).reshape(-1, 3).T[:, kind_of]
        cycles = (microbatch[maker] - microbatch[by_maker]) // m
        return cls(maker, by_maker, cycles, transfer, latency, blocks.astype(np.bool_))


def _transfer(program: Program, cost: Cost, op: int, chunk: int) -> tuple[float, float, bool]:
    """The time of a link to send the output of an action, its latency, and whether it blocks the sender."""
    placement = program.schedule.placement
    link = cost.links.get((placement[chunk], placement[int(program.feeds[op, chunk])]), cost.link)
    return message_bytes(cost, Op(op), chunk) / link.bandwidth, link.latency, not link.overlap


def _previous(group: Ints) -> tuple[Ints, Ints]:
    """For each element the previous one of its group, of the last cycle for the first (then 1, otherwise 0)."""
    order = group.argsort(kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    before = np.roll(order, 1)
    before[first] = order[np.roll(first, -1) - 1]
    previous, wraps = np.empty_like(order), np.zeros_like(order)
    previous[order], wraps[order[first]] = before, 1
    return previous, wraps


def _anchors(before: Ints) -> Ints:
    """For each event the loop that its waits lead to, named by the smallest event of the loop."""
    least, reached = np.minimum(np.arange(len(before)), before), before
    for _ in range(len(before).bit_length()):
        least, reached = np.minimum(least, least[reached]), reached[reached]
    anchors: Ints = least[reached]
    return anchors


def _sums(to: Ints, *values: npt.NDArray[Any], stop: npt.NDArray[np.bool_]) -> list[npt.NDArray[Any]]:
    """The sum of each value on the way from an event to where its way stops."""
    sums = [np.where(stop, 0, value) for value in values]
    for _ in range(len(to).bit_length()):
        sums = [value + value[to] for value in sums]
        to = to[to]
    return sums


def _loop_of(anchor: int, before: Ints) -> Ints:
    events = [anchor]
    while (event := int(before[events[-1]])) != anchor:
        events.append(event)
    return np.array(events)

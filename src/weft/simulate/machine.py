"""The machine that executes a lowered schedule in simulated time.

Each rank runs its rows in order; a row starts when the rank is free and what it needs has arrived. All ranks
that can go on do so at once, a numpy operation for all of them, so the cost of a run is a few array operations
for each row of the longest stream. The machine runs cycle by cycle: every rank completes a cycle before any
starts the next. That is an order of bookkeeping only and changes no time.

What a cycle hands to the next is the machine's *state*: the ranks' clocks, the links' and the messages under
way. Where the state after two cycles is the same but for a shift of time, all that follows repeats: the steady
state is exact, not estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import ScheduleError
from weft.schedule import Op, Program
from weft.schedule.actions import BACKWARDS, NONE, Action
from weft.simulate.cost import Cost

Floats = npt.NDArray[np.float64]

ALWAYS, NOWHERE = 0, 1  # arrival slots: what has always been there, and what nobody waits for


@dataclass(frozen=True, kw_only=True, eq=False)
class Cycle:
    """When the rows of one cycle ran, rows x ranks; `live` marks the rows that did."""

    number: int
    live: npt.NDArray[np.bool_]
    end: Floats
    arrived: Floats  # when the row's input was there; -inf where it needs none


@dataclass(frozen=True, eq=False)
class State:
    """What the future depends on, in time relative to rank 0's clock."""

    now: float
    times: Floats
    slots: npt.NDArray[np.int64]

    def repeats(self, other: State, scale: float) -> bool:
        return np.array_equal(self.slots, other.slots) and bool(
            np.allclose(self.times, other.times, rtol=0, atol=1e-9 * scale)
        )


class Machine:
    def __init__(self, program: Program, cost: Cost) -> None:
        schedule = program.schedule
        cost.check(schedule)
        self.program = program
        self.ranks, self.chunks = schedule.stages, schedule.chunks
        self.microbatches = schedule.microbatches
        spread = int(program.index.max()) + 1 - int(program.index.min(initial=0))
        self.ring = spread  # micro-batches that can be under way at once
        self.clock = np.zeros(self.ranks)
        self.arrival = np.full(2 + 2 * self.chunks * self.ring, np.nan)
        self.arrival[ALWAYS] = -np.inf
        self.duration = durations(cost)
        self._plan_links(cost)

    def _plan_links(self, cost: Cost) -> None:
        """Per op and chunk: which link its output takes, and what the transfer costs."""
        program, placement = self.program, self.program.schedule.placement
        edges: dict[tuple[int, int], int] = {}
        self.edge = np.zeros((len(Op), self.chunks), np.int64)
        self.transfer, self.latency = np.zeros((len(Op), self.chunks)), np.zeros((len(Op), self.chunks))
        self.blocks = np.zeros((len(Op), self.chunks), np.bool_)
        sender = []
        for op in (Op.F, *BACKWARDS):
            for chunk in range(self.chunks):
                to = int(program.feeds[op, chunk])
                if to < 0 or placement[to] == placement[chunk]:
                    continue
                pair = (placement[chunk], placement[to])
                if pair not in edges:
                    edges[pair] = len(edges)
                    sender.append(pair[0])
                link = cost.links.get(pair, cost.link)
                self.edge[op, chunk] = edges[pair]
                self.transfer[op, chunk] = message_bytes(cost, op, chunk) / link.bandwidth
                self.latency[op, chunk] = link.latency
                self.blocks[op, chunk] = not link.overlap
        self.sender = np.array(sender, np.int64)
        self.free = np.zeros(len(edges))  # when each link has sent all that it was given
        self.hops = bool(self.transfer.any() or self.latency.any())

    def run(self, number: int, *, minibatches: int | None = None) -> Cycle:
        """Run cycle `number` of a window (None: of an endless run)."""
        program, ranks = self.program, self.ranks
        height = program.op.shape[0]
        live = (program.op != NONE) & (program.batch >= -number)
        if minibatches is not None:
            live &= program.batch < minibatches - number
        kind, need, give = self._slots(number, live)
        duration = np.append(self.duration.ravel(), 0.0)
        end, arrived = np.empty((height, ranks)), np.empty((height, ranks))
        flat_end, flat_arrived, arrival, clock = end.ravel(), arrived.ravel(), self.arrival, self.clock
        place, stop = np.arange(ranks), height * ranks
        going = np.arange(ranks)
        while going.size:
            at = place[going]
            slot = need[at]
            when = arrival[slot]
            ready = when == when  # what has not arrived is not a number
            if not ready.all():
                going_now = going[ready]
                if not going_now.size:
                    self._deadlock(number, going, place)
                at, slot, when = at[ready], slot[ready], when[ready]
            else:
                going_now = going
            what = kind[at]
            done = np.maximum(clock[going_now], when) + duration[what]
            flat_end[at], flat_arrived[at] = done, when
            arrival[slot] = np.nan  # taken
            arrival[ALWAYS] = -np.inf
            clock[going_now] = done
            arrival[give[at]] = self._send(going_now, what, done) if self.hops else done
            place[going_now] = at + ranks
            going = going[place[going] < stop]
        return Cycle(number=number, live=live, end=end, arrived=arrived)

    def _slots(self, number: int, live: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.integer], ...]:
        """Flat tables for a cycle: each row's op and chunk, the slot it waits for, the slot it fills."""
        program = self.program
        kinds = len(Op) * self.chunks  # one more is the row that does nothing
        kind = np.where(live, program.op * np.int32(self.chunks) + program.chunk, np.int32(kinds)).ravel()
        column = ((program.index + np.int32(number * self.microbatches % self.ring)) % np.int32(self.ring)).ravel()

        def table(neighbours: npt.NDArray[np.integer], own: bool, none: int) -> npt.NDArray[np.int32]:
            """Where rows of each kind begin to count in `arrival`; forwards first, then backwards."""
            chunks = np.broadcast_to(np.arange(self.chunks), neighbours.shape) if own else neighbours
            passes = np.isin(np.arange(len(Op)), BACKWARDS)[:, None] * self.chunks
            begin = np.where(neighbours < 0, -1, 2 + (passes + chunks) * self.ring)
            flat = np.append(begin.ravel(), -1).astype(np.int32)[kind]
            return np.where(flat < 0, np.int32(none), flat + column)

        return kind, table(program.needs, True, ALWAYS), table(program.feeds, False, NOWHERE)

    def _send(self, ranks: npt.NDArray[np.int64], kind: npt.NDArray[np.integer], done: Floats) -> Floats:
        """When the outputs of actions that ended at `done` arrive."""
        kinds = self.edge.size
        arrives = done.copy()
        some = np.flatnonzero(kind < kinds)
        some = some[(self.transfer.ravel()[kind[some]] > 0) | (self.latency.ravel()[kind[some]] > 0)]
        if some.size:
            what = kind[some]
            edge = self.edge.ravel()[what]
            self.free[edge] = np.maximum(done[some], self.free[edge]) + self.transfer.ravel()[what]
            arrives[some] = self.free[edge] + self.latency.ravel()[what]
            blocked = some[self.blocks.ravel()[what]]
            self.clock[ranks[blocked]] = arrives[blocked]
        return arrives

    def state(self, number: int) -> State:
        """The state after cycle `number`, micro-batches counted from the next cycle's first."""
        now = float(self.clock[0])
        slots = 2 + np.flatnonzero(~np.isnan(self.arrival[2:]))
        lane, column = np.divmod(slots - 2, self.ring)
        order = lane * self.ring + (column - (number + 1) * self.microbatches) % self.ring
        sort = order.argsort()
        busy = np.maximum(self.free, self.clock[self.sender]) if self.free.size else self.free
        times = np.concatenate([self.clock, busy, self.arrival[slots][sort]]) - now
        return State(now, times, order[sort])

    def _deadlock(self, number: int, going: npt.NDArray[np.int64], place: npt.NDArray[np.int64]) -> None:
        rank = int(going[0])
        row = int(place[rank]) // self.ranks
        program = self.program
        index = int(program.index[row, rank]) + number * self.microbatches
        action = Action(Op(int(program.op[row, rank])), int(program.chunk[row, rank]), index)
        raise ScheduleError(
            "no deadlock",
            f"every rank waits for another; rank {rank} waits before {action}; weft.verify shows the whole grid",
        )


def durations(cost: Cost) -> Floats:
    """Time of each op in each chunk."""
    table = np.zeros((len(Op), len(cost.chunks)))
    for chunk, one in enumerate(cost.chunks):
        again = one.forward if one.recompute else 0.0
        table[Op.F, chunk] = one.forward
        table[Op.B, chunk] = again + one.backward_input + one.backward_weight
        table[Op.I, chunk] = again + one.backward_input
        table[Op.W, chunk] = one.backward_weight
        table[Op.U, chunk] = one.update
    return table


def message_bytes(cost: Cost, op: Op, chunk: int) -> float:
    """Bytes that an action's output takes: the next chunk's input, or the gradient of its own."""
    return cost.chunks[chunk + 1].input_bytes if op == Op.F else cost.chunks[chunk].input_bytes

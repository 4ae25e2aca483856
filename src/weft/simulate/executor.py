"""Execution of a lowered schedule in simulated time.

Each rank runs its rows in order; a row starts when the rank is free and its input has arrived. All ranks that can
continue advance together, with one numpy operation for all of them, so a run costs a few array operations per row
of the longest stream. The executor runs in segments of one cycle, or of several where a cycle has fewer rows than
there are ranks. Every rank completes a segment before any rank starts the next; this affects only the bookkeeping,
not the simulated times.

The *state* between two segments is the clocks of the ranks and links and the messages in transit. If the states
after two segments differ only by a shift of time, everything after them repeats: the steady state is exact, not
estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.errors import ScheduleError
from weft.schedule import BACKWARDS, NONE, Action, Op, Program
from weft.simulate.cost import Cost, action_durations, message_bytes

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.integer]

ALWAYS, NOWHERE = 0, 1  # arrival slots: of rows that need no input, and of outputs that no row needs


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """The times of the rows of consecutive cycles, ranks x rows; `live` marks the rows that ran."""

    cycles: range
    live: npt.NDArray[np.bool_]
    end: Floats
    arrived: Floats | None  # when the row's input arrived, -inf if it needs none; None if inputs have no size


@dataclass(frozen=True, eq=False)
class State:
    """All that later segments depend on once every row runs; times are relative to the clock of rank 0."""

    now: float
    times: Floats
    slots: npt.NDArray[np.int64]

    def repeats(self, other: State) -> bool:
        """Whether the states differ only by a shift of time, within rounding."""
        noise = 64 * np.finfo(np.float64).eps * abs(self.now)
        return np.array_equal(self.slots, other.slots) and bool((abs(self.times - other.times) <= noise).all())


class Executor:
    """Runs a program segment by segment.

    Tables are indexed by *kind*, an op in a chunk (`op * chunks + chunk`); the last kind is the row that does nothing.
    """

    def __init__(self, program: Program, cost: Cost) -> None:
        schedule = program.schedule
        cost.check(schedule)
        if idle := np.flatnonzero((program.op == NONE).all(axis=1)).tolist():
            raise ScheduleError("placement", f"{schedule.title}: rank {idle[0]} has nothing to do")
        self.program = program
        self.ranks, self.chunks, self.microbatches = schedule.stages, schedule.chunks, schedule.microbatches
        self.max_cycles = max(1, self.ranks // program.op.shape[1])  # cycles per segment
        self.after_norm = rows_after_norm(program)
        if self.after_norm is not None:
            self.max_cycles = 1
        # number of micro-batches that can be in transit at once
        self.ring = (
            int(program.index.max()) + 1 - int(program.index.min(initial=0)) + (self.max_cycles - 1) * self.microbatches
        )
        self.clock = np.zeros(self.ranks)
        self.arrival = np.full(2 + 2 * self.chunks * self.ring, np.nan)  # by pass, chunk and micro-batch
        self.arrival[ALWAYS] = -np.inf
        self.duration = np.append(action_durations(cost).ravel(), 0.0)
        self.sizes = any(chunk.input_bytes for chunk in cost.chunks)
        chunks = np.broadcast_to(np.arange(self.chunks), program.needs.shape)
        self.need = self._lanes(program.needs, chunks, ALWAYS)
        self.give = self._lanes(program.feeds, program.feeds, NOWHERE)
        self._plan_links(cost)

    def _lanes(self, neighbour: Ints, taker: Ints, none: int) -> tuple[Ints, Ints]:
        """Per kind: the offset of its slots in `arrival`, and whether to add the micro-batch to it (1 or 0)."""
        backward = np.isin(np.arange(len(Op)), BACKWARDS)[:, None]
        begin = np.where(neighbour < 0, none, 2 + (backward * self.chunks + taker) * self.ring)
        return np.append(begin.ravel(), none), np.append(neighbour.ravel() >= 0, False).astype(np.int64)

    def _plan_links(self, cost: Cost) -> None:
        """Per kind: the link of its output and the cost of the transfer; the last link stands for no link."""
        program, placement = self.program, self.program.schedule.placement
        kinds = len(Op) * self.chunks + 1
        links: dict[tuple[int, int], int] = {}
        link_of = np.full(kinds, -1)
        self.transfer, self.latency, self.blocks = np.zeros(kinds), np.zeros(kinds), np.zeros(kinds, np.bool_)
        for op in (Op.F, *BACKWARDS):
            for chunk in range(self.chunks):
                receiver = int(program.feeds[op, chunk])
                if receiver < 0 or placement[receiver] == placement[chunk]:
                    continue
                pair, kind = (placement[chunk], placement[receiver]), op * self.chunks + chunk
                link = cost.links.get(pair, cost.link)
                link_of[kind] = links.setdefault(pair, len(links))
                self.transfer[kind] = message_bytes(cost, op, chunk) / link.bandwidth
                self.latency[kind] = link.latency
                self.blocks[kind] = not link.overlap
        self.sender = np.array([sender for sender, _ in links], np.int64)
        self.free = np.zeros(len(links) + 1)  # when each link has sent all its messages
        self.link_of = np.where(link_of < 0, len(links), link_of)
        self.hops = bool(self.transfer.any() or self.latency.any())

    def segments(self, cycles: range, *, minibatches: int | None = None) -> Iterator[Segment]:
        """Run the next cycles of a window (None: of an endless run)."""
        for first in range(cycles.start, cycles.stop, self.max_cycles):
            yield self.run(range(first, min(first + self.max_cycles, cycles.stop)), minibatches=minibatches)

    def run(self, cycles: range, *, minibatches: int | None = None) -> Segment:
        """Run one segment of at most `max_cycles` cycles."""
        number = np.arange(cycles.start, cycles.stop, dtype=np.int32)[:, None]
        batch = self.program.batch[:, None, :]
        live = (self.program.op != NONE)[:, None, :] & (batch >= -number)
        if minibatches is not None:
            live &= batch < minibatches - number
        live = live.reshape(self.ranks, -1)
        busy = np.flatnonzero(live.any(axis=0))
        height = int(busy[-1]) + 1 if busy.size else 0  # the ends of the streams are idle while the pipeline drains
        live = live[:, :height]
        kind, column = self._rows(number, live)
        after_norm = self._after_norm(cycles.start, height)
        normed = self.clock.max()  # a cycle ends with the updates that make a norm (`norm_order.py`)
        end = np.empty(live.shape)
        arrived = np.empty(live.shape) if self.sizes else None
        segment = Segment(cycles=cycles, live=live, end=end, arrived=arrived)
        end, arrived = end.ravel(), None if arrived is None else arrived.ravel()
        arrival, clock, (need, needs), (give, gives) = self.arrival, self.clock, self.need, self.give
        place = np.arange(self.ranks) * height
        stop = place + height
        turn = 0
        going = np.arange(self.ranks if height else 0)
        while going.size:
            all_ranks = going.size == self.ranks
            ranks: slice | Ints = slice(None) if all_ranks else going  # a slice is much cheaper
            at = place.copy() if all_ranks else place[going]
            what, microbatch = kind[at], column[at]
            slot = need[what] + needs[what] * microbatch
            when = arrival[slot]
            ready = when == when  # the arrival of a missing message is nan
            if not ready.all():
                ranks, at, what, microbatch = going[ready], at[ready], what[ready], microbatch[ready]
                slot, when = slot[ready], when[ready]
                if not at.size:
                    self._deadlock(cycles.start, int(going[0]), int(place[going[0]] % height))
            if after_norm is not None:
                when = np.where(after_norm[at], np.maximum(when, normed), when)
            done = np.maximum(clock[ranks], when) + self.duration[what]
            end[at] = done
            if arrived is not None:
                arrived[at] = when
            arrival[slot] = np.nan  # taken
            arrival[ALWAYS] = -np.inf
            clock[ranks] = done
            arrival[give[what] + gives[what] * microbatch] = self._send(ranks, what, done) if self.hops else done
            place[ranks] = at + 1
            turn += 1
            if turn >= height:  # no rank can finish earlier
                going = going[place[going] < stop[going]]
        return segment

    def _rows(self, number: Ints, live: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """The rows of a segment, flat: their kind, and the slot of their micro-batch in the ring."""
        columns = (self.program.op, self.program.chunk, self.program.index)
        op, chunk, index = (column[:, None, :] for column in columns)
        kind = np.broadcast_to(op * np.int32(self.chunks) + chunk, (self.ranks, len(number), op.shape[2]))
        kind = kind.reshape(self.ranks, -1)[:, : live.shape[1]]
        shift = number * np.int32(self.microbatches) % np.int32(self.ring)
        column = ((index + shift) % np.int32(self.ring)).reshape(self.ranks, -1)[:, : live.shape[1]]
        return np.where(live, kind, np.int32(len(Op) * self.chunks)).ravel(), column.ravel()

    def _after_norm(self, cycle: int, height: int) -> npt.NDArray[np.bool_] | None:
        """The rows of a cycle that wait for a norm, flat; before the first update there is none."""
        first = 1 - int(self.program.batch[self.program.op == Op.U].min(initial=0))
        return self.after_norm[:, :height].ravel() if self.after_norm is not None and cycle >= first else None

    def _send(self, ranks: slice | Ints, what: Ints, done: Floats) -> Floats:
        """When the outputs of actions that ended at `done` arrive."""
        link = self.link_of[what]
        self.free[-1] = -np.inf  # an output without a link never waits
        self.free[link] = sent = np.maximum(done, self.free[link]) + self.transfer[what]
        arrives: Floats = sent + self.latency[what]
        blocked = self.blocks[what]
        if blocked.any():
            self.clock[ranks] = np.where(blocked, arrives, done)
        return arrives

    def state(self, cycles: int) -> State:
        """The state after this number of cycles; micro-batches are counted from the first of the next cycle."""
        now = float(self.clock[0])
        slots = 2 + np.flatnonzero(~np.isnan(self.arrival[2:]))
        lane, column = np.divmod(slots - 2, self.ring)
        order = lane * self.ring + (column - cycles * self.microbatches) % self.ring
        sort = order.argsort()
        busy = np.maximum(self.free[:-1], self.clock[self.sender])
        times = np.concatenate([self.clock, busy, self.arrival[slots][sort]]) - now
        return State(now, times, order[sort])

    def _deadlock(self, first: int, rank: int, row: int) -> NoReturn:
        program = self.program
        cycle, row = divmod(row, program.op.shape[1])
        index = int(program.index[rank, row]) + (first + cycle) * self.microbatches
        action = Action(Op(int(program.op[rank, row])), int(program.chunk[rank, row]), index)
        raise ScheduleError(
            "no deadlock",
            f"every rank waits for another rank; rank {rank} waits before {action}; weft.verify shows the grid",
        )


def rows_after_norm(program: Program) -> npt.NDArray[np.bool_] | None:
    """The rows that read what the cycle before theirs updated, and so wait for its norm; None without a global norm."""
    if program.schedule.weights.norm != "global":
        return None
    updated = program.batch[program.op == Op.U].min()
    after: npt.NDArray[np.bool_] = (program.batch - program.delay >= updated) & (program.op != Op.U)
    after &= program.op != NONE
    return after

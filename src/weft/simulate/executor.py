"""The machine that executes a lowered schedule in simulated time.

Each rank runs its rows in order; a row starts when the rank is free and what it needs has arrived. All ranks
that can go on do so at once, a numpy operation for all of them, so the cost of a run is a few array operations
for each row of the longest stream. The machine runs in stretches of one cycle, or of more where cycles are short
beside the number of ranks: every rank completes a stretch before any starts the next. That is an order of
bookkeeping only and changes no time.

What a stretch hands to the next is the machine's *state*: the ranks' clocks, the links' and the messages under
way. Where the state after two stretches is the same but for a shift of time, all that follows repeats: the steady
state is exact, not estimated.
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

ALWAYS, NOWHERE = 0, 1  # arrival slots: what has always been there, and what nobody waits for


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """When the rows of some cycles ran, ranks x rows of all of them; `live` marks the rows that did."""

    cycles: range
    live: npt.NDArray[np.bool_]
    end: Floats
    arrived: Floats | None  # when the row's input was there, -inf where it needs none; None if inputs have no size


@dataclass(frozen=True, eq=False)
class State:
    """What the future depends on once every row runs, in time relative to rank 0's clock."""

    now: float
    times: Floats
    slots: npt.NDArray[np.int64]

    def repeats(self, other: State) -> bool:
        """Whether it is the same state but for the time, as far as numbers of that size can tell."""
        noise = 64 * np.finfo(np.float64).eps * abs(self.now)
        return np.array_equal(self.slots, other.slots) and bool((abs(self.times - other.times) <= noise).all())


class Machine:
    """Tables are by *kind*, an op in a chunk (`op * chunks + chunk`); the last kind is the row that does nothing."""

    def __init__(self, program: Program, cost: Cost) -> None:
        schedule = program.schedule
        cost.check(schedule)
        if idle := np.flatnonzero((program.op == NONE).all(axis=1)).tolist():
            raise ScheduleError("placement", f"{schedule.title}: rank {idle[0]} has nothing to do")
        self.program = program
        self.ranks, self.chunks, self.microbatches = schedule.stages, schedule.chunks, schedule.microbatches
        self.most = max(1, self.ranks // program.op.shape[1])  # cycles in a stretch
        # micro-batches that can be under way at once
        self.ring = (
            int(program.index.max()) + 1 - int(program.index.min(initial=0)) + (self.most - 1) * self.microbatches
        )
        self.clock = np.zeros(self.ranks)
        self.arrival = np.full(2 + 2 * self.chunks * self.ring, np.nan)  # by pass, chunk and micro-batch
        self.arrival[ALWAYS] = -np.inf
        self.duration = np.append(action_durations(cost).ravel(), 0.0)
        self.sizes = any(chunk.input_bytes for chunk in cost.chunks)
        own = np.broadcast_to(np.arange(self.chunks), program.needs.shape)
        self.need = self._lanes(program.needs, own, ALWAYS)
        self.give = self._lanes(program.feeds, program.feeds, NOWHERE)
        self._plan_links(cost)

    def _lanes(self, neighbour: Ints, taker: Ints, none: int) -> tuple[Ints, Ints]:
        """Where each kind's slots in `arrival` begin, and whether micro-batches count on from there (1 or 0)."""
        backward = np.isin(np.arange(len(Op)), BACKWARDS)[:, None]
        begin = np.where(neighbour < 0, none, 2 + (backward * self.chunks + taker) * self.ring)
        return np.append(begin.ravel(), none), np.append(neighbour.ravel() >= 0, False).astype(np.int64)

    def _plan_links(self, cost: Cost) -> None:
        """Per kind: which link its output takes, and what the transfer costs; the last link is none."""
        program, placement = self.program, self.program.schedule.placement
        kinds = len(Op) * self.chunks + 1
        links: dict[tuple[int, int], int] = {}
        link_of = np.full(kinds, -1)
        self.transfer, self.latency, self.blocks = np.zeros(kinds), np.zeros(kinds), np.zeros(kinds, np.bool_)
        for op in (Op.F, *BACKWARDS):
            for chunk in range(self.chunks):
                to = int(program.feeds[op, chunk])
                if to < 0 or placement[to] == placement[chunk]:
                    continue
                pair, kind = (placement[chunk], placement[to]), op * self.chunks + chunk
                link = cost.links.get(pair, cost.link)
                link_of[kind] = links.setdefault(pair, len(links))
                self.transfer[kind] = message_bytes(cost, op, chunk) / link.bandwidth
                self.latency[kind] = link.latency
                self.blocks[kind] = not link.overlap
        self.sender = np.array([sender for sender, _ in links], np.int64)
        self.free = np.zeros(len(links) + 1)  # when each link has sent all that it was given
        self.link_of = np.where(link_of < 0, len(links), link_of)
        self.hops = bool(self.transfer.any() or self.latency.any())

    def stretches(self, cycles: range, *, minibatches: int | None = None) -> Iterator[Segment]:
        """Run cycles, which follow those that have been run, of a window (None: of an endless run)."""
        for first in range(cycles.start, cycles.stop, self.most):
            yield self.run(range(first, min(first + self.most, cycles.stop)), minibatches=minibatches)

    def run(self, cycles: range, *, minibatches: int | None = None) -> Segment:
        """Run one stretch, of `most` cycles at the most."""
        number = np.arange(cycles.start, cycles.stop, dtype=np.int32)[:, None]
        batch = self.program.batch[:, None, :]
        live = (self.program.op != NONE)[:, None, :] & (batch >= -number)
        if minibatches is not None:
            live &= batch < minibatches - number
        live = live.reshape(self.ranks, -1)
        busy = np.flatnonzero(live.any(axis=0))
        height = int(busy[-1]) + 1 if busy.size else 0  # while draining, the ends of the streams are idle
        live = live[:, :height]
        kind, column = self._rows(number, live)
        end = np.empty(live.shape)
        arrived = np.empty(live.shape) if self.sizes else None
        stretch = Segment(cycles=cycles, live=live, end=end, arrived=arrived)
        end, arrived = end.ravel(), None if arrived is None else arrived.ravel()
        arrival, clock, (need, needs), (give, gives) = self.arrival, self.clock, self.need, self.give
        place = np.arange(self.ranks) * height
        stop = place + height
        turn = 0
        going = np.arange(self.ranks if height else 0)
        while going.size:
            everyone = going.size == self.ranks
            ranks: slice | Ints = slice(None) if everyone else going  # a slice is much the cheaper
            at = place.copy() if everyone else place[going]
            what, microbatch = kind[at], column[at]
            slot = need[what] + needs[what] * microbatch
            when = arrival[slot]
            ready = when == when  # what has not arrived is not a number
            if not ready.all():
                ranks, at, what, microbatch = going[ready], at[ready], what[ready], microbatch[ready]
                slot, when = slot[ready], when[ready]
                if not at.size:
                    self._deadlock(cycles.start, int(going[0]), int(place[going[0]] % height))
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
            if turn >= height:  # before, no rank can be through
                going = going[place[going] < stop[going]]
        return stretch

    def _rows(self, number: Ints, live: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """The rows of a stretch, flat: their kind, and their micro-batch's place in the ring."""
        op, chunk, index = (one[:, None, :] for one in (self.program.op, self.program.chunk, self.program.index))
        kind = np.broadcast_to(op * np.int32(self.chunks) + chunk, (self.ranks, len(number), op.shape[2]))
        kind = kind.reshape(self.ranks, -1)[:, : live.shape[1]]
        shift = number * np.int32(self.microbatches) % np.int32(self.ring)
        column = ((index + shift) % np.int32(self.ring)).reshape(self.ranks, -1)[:, : live.shape[1]]
        return np.where(live, kind, np.int32(len(Op) * self.chunks)).ravel(), column.ravel()

    def _send(self, ranks: slice | Ints, what: Ints, done: Floats) -> Floats:
        """When the outputs of actions that ended at `done` arrive."""
        link = self.link_of[what]
        self.free[-1] = -np.inf  # what takes no link waits for none
        self.free[link] = sent = np.maximum(done, self.free[link]) + self.transfer[what]
        arrives: Floats = sent + self.latency[what]
        blocked = self.blocks[what]
        if blocked.any():
            self.clock[ranks] = np.where(blocked, arrives, done)
        return arrives

    def state(self, cycles: int) -> State:
        """The state after so many cycles, micro-batches counted from the next one's first."""
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
            f"every rank waits for another; rank {rank} waits before {action}; weft.verify shows the whole grid",
        )

"""What a rank holds, by category, while it runs: counted along its executed rows.

weights          the newest version of its chunks
extra_versions   older versions that something still reads
gradients        of a chunk, from a mini-batch's first weight gradient in it (B or W) to its update
optimizer        the optimizer's own state
activations      from a forward's start to its backward's end (with recompute, the input until then)
buffers          what was handed over and waits for its action, also from a chunk of the same rank; predicted
                 weights while they are used
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.schedule import BACKWARDS, RETIRING, Op, Program, is_any
from weft.simulate.cost import Cost, action_durations
from weft.simulate.executor import Floats, Ints, Segment

ROUNDING = 1e-12  # of times, relative to the length of the run
CATEGORIES = ("weights", "extra_versions", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """A rank's peak: the categories at the moment when their sum is largest, and peaks in counts.

    `apart_from_messages` has those of another moment: when the sum of all but waiting messages, which are left out of
    its buffers, is largest. This is what a rank's own meters count.
    """

    bytes: dict[str, float]
    apart_from_messages: dict[str, float]
    in_flight: float  # micro-batches between forward and backward, in whole stages
    versions: dict[int, int]  # chunk -> versions held, the newest included

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def measure(program: Program, cost: Cost, stretches: list[Segment]) -> list[RankMemory]:
    """The peaks of every rank over all that was executed."""
    sizes = _Sizes.of(program, cost)
    return [_measure_rank(_Ran.of(program, stretches, rank), sizes) for rank in range(program.schedule.stages)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sizes:
    """What an op in a chunk takes and gives, by kind (`op * chunks + chunk`); `weight` and so on are a chunk's own."""

    weight: Floats
    optimizer: Floats
    gradient: Floats
    keeps: Floats  # activations that come with its start
    drops: Floats  # activations that go with its end
    handed: Floats  # the input that it takes over from its neighbour
    spent: Floats  # its time
    flies: npt.NDArray[np.int8]  # micro-batches in flight: 1 more with its start
    lands: npt.NDArray[np.int8]  # 1 less with its end

    @classmethod
    def of(cls, program: Program, cost: Cost) -> _Sizes:
        def column(name: str) -> Floats:
            return np.array([getattr(chunk, name) for chunk in cost.chunks], np.float64)

        whole, inputs = column("activation_bytes"), column("input_bytes")
        kept = np.where(column("recompute"), inputs, whole)  # from forward to backward
        keeps, drops, handed = (np.zeros(program.needs.shape) for _ in range(3))
        keeps[Op.F], keeps[Op.B], keeps[Op.I] = kept, whole - kept, whole - kept
        drops[RETIRING, :] = whole
        handed[Op.F, 1:] = inputs[1:]
        handed[BACKWARDS, :-1] = inputs[1:]
        op = np.repeat(np.arange(len(Op), dtype=np.int8), len(cost.chunks))
        return cls(
            weight=column("weight_bytes"),
            optimizer=column("optimizer_bytes"),
            gradient=column("gradient_bytes"),
            keeps=keeps.ravel(),
            drops=drops.ravel(),
            handed=handed.ravel(),
            spent=action_durations(cost).ravel(),
            flies=(op == Op.F).astype(np.int8),
            lands=is_any(op, RETIRING).astype(np.int8),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """The rows that a rank ran, in order, over all stretches; the moments are places among them."""

    chunks: list[int]
    kind: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    end: Floats
    arrived: Floats | None
    opens: Ints  # a mini-batch's first weight gradient in its chunk
    updates: Ints
    dies: Ints  # the version read (or, by an update, replaced)
    predicts: Ints
    forgets: Ints

    @classmethod
    def of(cls, program: Program, stretches: list[Segment], rank: int) -> _Ran:
        op, chunk = program.op[rank], program.chunk[rank]
        live = [stretch.live[rank] for stretch in stretches]

        def over(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
            parts = []
            for stretch, one in zip(stretches, live, strict=True):
                table = column if len(stretch.cycles) == 1 else np.tile(column, len(stretch.cycles))
                parts.append(table[: one.size][one])
            return np.concatenate(parts)

        def moments(flag: npt.NDArray[np.bool_]) -> Ints:
            return np.flatnonzero(over(flag))

        def ran(columns: list[Floats]) -> Floats:
            return np.concatenate([column[rank, one] for column, one in zip(columns, live, strict=True)])

        number = np.concatenate(
            [
                np.repeat(np.asarray(stretch.cycles), len(op))[: one.size][one]
                for stretch, one in zip(stretches, live, strict=True)
            ]
        )
        # a version below 0 is the first one, which lives on for later readers
        dies = over(program.dies[rank]) & (over(program.batch[rank]) + number >= over(program.delay[rank]))
        arrived = [stretch.arrived for stretch in stretches if stretch.arrived is not None]
        return cls(
            chunks=program.schedule.chunks_of(rank),
            kind=over(op * np.int32(program.schedule.chunks) + chunk),
            chunk=over(chunk),
            end=ran([stretch.end for stretch in stretches]),
            arrived=ran(arrived) if arrived else None,
            opens=moments(_opens(program, rank)),
            updates=moments(op == Op.U),
            dies=np.flatnonzero(dies),
            predicts=moments(program.predicts[rank]),
            forgets=moments(program.forgets[rank]),
        )


def _opens(program: Program, rank: int) -> npt.NDArray[np.bool_]:
    """Rows at which a gradient comes into being: a chunk's first of the youngest mini-batch in the cycle."""
    op, chunk, batch = program.op[rank], program.chunk[rank], program.batch[rank]
    opens = np.zeros(len(op), np.bool_)
    for one in program.schedule.chunks_of(rank):
        mine = np.flatnonzero(is_any(op, RETIRING) & (chunk == one))
        if mine.size:
            opens[mine[batch[mine].argmax()]] = True
    return opens


class _Change(NamedTuple):
    """How much of a category comes or goes at some moments: with the row's start, or else with its end."""

    category: str
    moments: Ints
    with_start: bool
    by: Floats


def _measure_rank(ran: _Ran, sizes: _Sizes) -> RankMemory:
    weight, gradient = sizes.weight, sizes.gradient
    starts, ends = sizes.keeps[ran.kind], -sizes.drops[ran.kind]
    changes = [
        _Change("gradients", ran.opens, True, gradient[ran.chunk[ran.opens]]),
        _Change("gradients", ran.updates, False, -gradient[ran.chunk[ran.updates]]),
        _Change("extra_versions", ran.updates, False, weight[ran.chunk[ran.updates]]),
        _Change("extra_versions", ran.dies, False, -weight[ran.chunk[ran.dies]]),
        _Change("buffers", ran.predicts, True, weight[ran.chunk[ran.predicts]]),
        _Change("buffers", ran.forgets, False, -weight[ran.chunk[ran.forgets]]),
    ]
    for _, moments, with_start, by in changes:
        (starts if with_start else ends)[moments] += by
    after = np.cumsum(starts + ends)
    during = after - ends
    apart = whole = _held(ran, sizes, changes, *_peak(during, after))
    if ran.arrived is not None:
        at_end, at_start = _waiting(ran, ran.arrived, sizes)
        place, running = _peak(during + at_end, after + at_start)
        whole = _held(ran, sizes, changes, place, running)
        whole["buffers"] += float((at_end if running else at_start)[place])
    flies, lands = sizes.flies[ran.kind], sizes.lands[ran.kind]
    return RankMemory(
        bytes=whole,
        apart_from_messages=apart,
        in_flight=int((np.cumsum(flies - lands, dtype=np.int32) + lands).max()) / len(ran.chunks),
        versions={one: 1 + _most_extra(ran, one) for one in ran.chunks},
    )


def _peak(during: Floats, after: Floats) -> tuple[int, bool]:
    """The row of the peak, and whether it is while that row runs; else it is between that row and the next."""
    running = bool(during.max() >= after.max())
    return int((during if running else after).argmax()), running


def _held(ran: _Ran, sizes: _Sizes, changes: list[_Change], place: int, running: bool) -> dict[str, float]:
    """The categories at a moment, without waiting messages."""
    held = dict.fromkeys(CATEGORIES, 0.0)
    held["weights"], held["optimizer"] = sizes.weight[ran.chunks].sum(), sizes.optimizer[ran.chunks].sum()
    for name, moments, with_start, by in changes:
        held[name] += by[(moments < place) | ((moments == place) & (with_start or not running))].sum()
    kinds = ran.kind[: place + 1]
    gone = kinds[:-1] if running else kinds
    held["activations"] = sizes.keeps[kinds].sum() - sizes.drops[gone].sum()
    return {name: float(value) for name, value in held.items()}


def _most_extra(ran: _Ran, chunk: int) -> int:
    """Versions of a chunk beyond the newest, at the most."""
    made, dead = (moments[ran.chunk[moments] == chunk] for moments in (ran.updates, ran.dies))
    moments = np.concatenate([made, dead])
    order = moments.argsort(kind="stable")
    changes = np.repeat([1, -1], [made.size, dead.size])[order]
    # a version that dies in the update which replaces it was never beside the newest
    return int((np.cumsum(changes) - np.isin(moments[order], dead) * (changes == 1)).max(initial=0))


def _waiting(ran: _Ran, arrived: Floats, sizes: _Sizes) -> tuple[Floats, Floats]:
    """Bytes that have arrived and wait: at each row's end, and just before the next row's start."""
    size = np.where(arrived > -np.inf, sizes.handed[ran.kind], 0.0)
    messages = np.flatnonzero(size)
    order = messages[arrived[messages].argsort(kind="stable")]
    times, there = arrived[order], np.concatenate([[0.0], np.cumsum(size[order])])
    taken = np.cumsum(size)
    end = ran.end + ROUNDING * ran.end[-1]  # what comes at the very end is there, whatever rounding made of it
    at_end = there[np.searchsorted(times, end, side="right")] - taken
    next_start = np.append((end - sizes.spent[ran.kind])[1:], end[-1])
    at_start = at_end.copy()
    idle = np.flatnonzero(next_start > end)  # else nothing can arrive between the two
    at_start[idle] = there[np.searchsorted(times, next_start[idle], side="right")] - taken[idle]
    return at_end, at_start

"""The memory of each rank by category, counted along the rows that it executes.

weights          the newest version of its chunks, as passes read it
masters          what passes read is rounded from them, with mixed precision
extra_versions   older versions that will still be read
gradients        of a chunk, from a mini-batch's first weight gradient in it (B or W) to its update
optimizer        the state of the optimizer
activations      from the start of a forward to the end of its backward (with recompute: only the input until the
                 backward starts; by layer: the inputs of all layers, and from then on one layer more; between the
                 halves of a split backward: what the second one needs)
buffers          inputs that have arrived and wait for their action, also from a chunk of the same rank; predicted
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

ROUNDING = 1e-12  # tolerance of times, relative to the length of the run
CATEGORIES = ("weights", "masters", "extra_versions", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The peak of a rank: the categories at the moment when their sum is largest, and peaks of counts.

    `apart_from_messages` is the peak without waiting messages, which may be at another moment. This is what the
    memory report of a real rank counts.
    """

    bytes: dict[str, float]
    apart_from_messages: dict[str, float]
    in_flight: float  # micro-batches between forward and backward, in whole stages
    versions: dict[int, int]  # chunk -> versions held, the newest included

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def measure(program: Program, cost: Cost, segments: list[Segment]) -> list[RankMemory]:
    """The peak of every rank over all executed segments."""
    sizes = _Sizes.of(program, cost)
    return [_measure_rank(_ExecutedRows.of(program, segments, rank), sizes) for rank in range(program.schedule.stages)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sizes:
    """Bytes and times: weight, master, optimizer and gradient per chunk, the rest per kind (`op * chunks + chunk`)."""

    weight: Floats
    master: Floats
    optimizer: Floats
    gradient: Floats
    keeps: Floats  # activations allocated at its start
    drops: Floats  # activations freed at its end
    handed: Floats  # the input that it gets from the neighbouring chunk
    spent: Floats  # its duration
    enters: npt.NDArray[np.int8]  # micro-batches in flight: 1 more at its start
    leaves: npt.NDArray[np.int8]  # 1 fewer at its end

    @classmethod
    def of(cls, program: Program, cost: Cost) -> _Sizes:
        def column(name: str) -> Floats:
            return np.array([getattr(chunk, name) for chunk in cost.chunks], np.float64)

        inputs = column("input_bytes")
        kept, rebuilt = np.array([chunk.held_bytes for chunk in cost.chunks], np.float64).T
        keeps, drops, handed = (np.zeros(program.needs.shape) for _ in range(3))
        keeps[Op.F], keeps[Op.B], keeps[Op.I] = kept, rebuilt, rebuilt
        deferred = column("held_between_halves")
        drops[Op.B], drops[Op.I], drops[Op.W] = kept + rebuilt, kept + rebuilt - deferred, deferred
        handed[Op.F, 1:] = inputs[1:]
        handed[BACKWARDS, :-1] = inputs[1:]
        op = np.repeat(np.arange(len(Op), dtype=np.int8), len(cost.chunks))
        return cls(
            weight=column("weight_bytes"),
            master=column("master_bytes"),
            optimizer=column("optimizer_bytes"),
            gradient=column("gradient_bytes"),
            keeps=keeps.ravel(),
            drops=drops.ravel(),
            handed=handed.ravel(),
            spent=action_durations(cost).ravel(),
            enters=(op == Op.F).astype(np.int8),
            leaves=is_any(op, RETIRING).astype(np.int8),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _ExecutedRows:
    """The rows that a rank ran, in order, over all segments; the moments are indices into them."""

    chunks: list[int]
    kind: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int16]
    end: Floats
    arrived: Floats | None
    opens: Ints  # first weight gradient of a mini-batch in its chunk, which allocates the gradient
    updates: Ints
    dies: Ints  # last read of a version (or the update that replaces it)
    predicts: Ints
    forgets: Ints

    @classmethod
    def of(cls, program: Program, segments: list[Segment], rank: int) -> _ExecutedRows:
        op, chunk = program.op[rank], program.chunk[rank]
        masks = [segment.live[rank] for segment in segments]

        def executed(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
            parts = []
            for segment, mask in zip(segments, masks, strict=True):
                table = column if len(segment.cycles) == 1 else np.tile(column, len(segment.cycles))
                parts.append(table[: mask.size][mask])
            return np.concatenate(parts)

        def moments(flag: npt.NDArray[np.bool_]) -> Ints:
            return np.flatnonzero(executed(flag))

        def times(columns: list[Floats]) -> Floats:
            return np.concatenate([column[rank, mask] for column, mask in zip(columns, masks, strict=True)])

        cycle = np.concatenate(
            [
                np.repeat(np.asarray(segment.cycles), len(op))[: mask.size][mask]
                for segment, mask in zip(segments, masks, strict=True)
            ]
        )
        # reads of a version below 0 read version 0, which later rows still need
        dies = executed(program.dies[rank]) & (executed(program.batch[rank]) + cycle >= executed(program.delay[rank]))
        arrived = [segment.arrived for segment in segments if segment.arrived is not None]
        return cls(
            chunks=program.schedule.chunks_of(rank),
            kind=executed(op * np.int32(program.schedule.chunks) + chunk),
            chunk=executed(chunk),
            end=times([segment.end for segment in segments]),
            arrived=times(arrived) if arrived else None,
            opens=moments(_opens(program, rank)),
            updates=moments(op == Op.U),
            dies=np.flatnonzero(dies),
            predicts=moments(program.predicts[rank]),
            forgets=moments(program.forgets[rank]),
        )


def _opens(program: Program, rank: int) -> npt.NDArray[np.bool_]:
    """Rows that allocate a gradient: the first weight gradient of a chunk's youngest mini-batch in the cycle."""
    op, chunk, batch = program.op[rank], program.chunk[rank], program.batch[rank]
    opens = np.zeros(len(op), np.bool_)
    for number in program.schedule.chunks_of(rank):
        retiring = np.flatnonzero(is_any(op, RETIRING) & (chunk == number))
        if retiring.size:
            opens[retiring[batch[retiring].argmax()]] = True
    return opens


class _Change(NamedTuple):
    """Bytes added to a category at certain moments, at the start of the row or at its end."""

    category: str
    moments: Ints
    with_start: bool
    by: Floats


def _measure_rank(ran: _ExecutedRows, sizes: _Sizes) -> RankMemory:
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
    enters, leaves = sizes.enters[ran.kind], sizes.leaves[ran.kind]
    return RankMemory(
        bytes=whole,
        apart_from_messages=apart,
        in_flight=int((np.cumsum(enters - leaves, dtype=np.int32) + leaves).max()) / len(ran.chunks),
        versions={chunk: 1 + _max_extra_versions(ran, chunk) for chunk in ran.chunks},
    )


def _peak(during: Floats, after: Floats) -> tuple[int, bool]:
    """The row of the peak, and whether the peak is while the row runs or between this row and the next."""
    running = bool(during.max() >= after.max())
    return int((during if running else after).argmax()), running


def _held(ran: _ExecutedRows, sizes: _Sizes, changes: list[_Change], place: int, running: bool) -> dict[str, float]:
    """The bytes of each category at a moment, without waiting messages."""
    held = dict.fromkeys(CATEGORIES, 0.0)
    for name, whole in (("weights", sizes.weight), ("masters", sizes.master), ("optimizer", sizes.optimizer)):
        held[name] = whole[ran.chunks].sum()
    for name, moments, with_start, by in changes:
        held[name] += by[(moments < place) | ((moments == place) & (with_start or not running))].sum()
    kinds = ran.kind[: place + 1]
    gone = kinds[:-1] if running else kinds
    held["activations"] = sizes.keeps[kinds].sum() - sizes.drops[gone].sum()
    return {name: float(value) for name, value in held.items()}


def _max_extra_versions(ran: _ExecutedRows, chunk: int) -> int:
    """The largest number of versions of a chunk besides the newest."""
    made, dead = (moments[ran.chunk[moments] == chunk] for moments in (ran.updates, ran.dies))
    moments = np.concatenate([made, dead])
    order = moments.argsort(kind="stable")
    changes = np.repeat([1, -1], [made.size, dead.size])[order]
    # a version that dies in the update that replaces it never exists besides the newest
    return int((np.cumsum(changes) - np.isin(moments[order], dead) * (changes == 1)).max(initial=0))


def _waiting(ran: _ExecutedRows, arrived: Floats, sizes: _Sizes) -> tuple[Floats, Floats]:
    """Bytes that have arrived and wait: at the end of each row, and just before the start of the next row."""
    size = np.where(arrived > -np.inf, sizes.handed[ran.kind], 0.0)
    messages = np.flatnonzero(size)
    order = messages[arrived[messages].argsort(kind="stable")]
    times, arrived_bytes = arrived[order], np.concatenate([[0.0], np.cumsum(size[order])])
    taken = np.cumsum(size)
    end = ran.end + ROUNDING * ran.end[-1]  # a message that arrives exactly at the end counts, despite rounding
    at_end = arrived_bytes[np.searchsorted(times, end, side="right")] - taken
    next_start = np.append((end - sizes.spent[ran.kind])[1:], end[-1])
    at_start = at_end.copy()
    idle = np.flatnonzero(next_start > end)  # otherwise nothing can arrive in between
    at_start[idle] = arrived_bytes[np.searchsorted(times, next_start[idle], side="right")] - taken[idle]
    return at_end, at_start

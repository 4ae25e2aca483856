"""What a rank holds, by category, while it runs: counted along its executed rows.

weights          the newest version of its chunks
extra_versions   older versions that something still reads
gradients        of a chunk, from a mini-batch's first backward in it to its update
optimizer        the optimizer's own state
activations      from a forward's start to its backward's end (with recompute, the input until then)
buffers          what has arrived and waits for its action; predicted weights while they are used
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.schedule import Op, Program
from weft.schedule.actions import BACKWARDS
from weft.simulate.cost import Cost
from weft.simulate.machine import Cycle, Floats, durations

CATEGORIES = ("weights", "extra_versions", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """A rank's peak: the categories at the moment when their sum is largest, and peaks in counts."""

    bytes: dict[str, float]
    in_flight: float  # micro-batches between forward and backward, in whole stages
    versions: dict[int, int]  # chunk -> versions held, the newest included

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


def measure(program: Program, cost: Cost, cycles: list[Cycle]) -> list[RankMemory]:
    """The peaks of every rank over executed cycles."""
    sizes, spent = _Sizes.of(program, cost), durations(cost)
    return [_measure_rank(_Ran.of(program, cycles, rank, spent), sizes) for rank in range(program.schedule.stages)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sizes:
    """Bytes a chunk, and of the hand-over that each op in a chunk takes in."""

    weight: Floats
    gradient: Floats
    optimizer: Floats
    kept: Floats  # from forward to backward
    whole: Floats  # while the backward runs
    handed: Floats  # op x chunk

    @classmethod
    def of(cls, program: Program, cost: Cost) -> _Sizes:
        def column(name: str) -> Floats:
            return np.array([getattr(chunk, name) for chunk in cost.chunks])

        whole, inputs = column("activation_bytes"), column("input_bytes")
        handed = np.zeros(program.needs.shape)
        handed[Op.F, 1:] = inputs[1:]
        for op in BACKWARDS:
            handed[op, :-1] = inputs[1:]
        return cls(
            weight=column("weight_bytes"),
            gradient=column("gradient_bytes"),
            optimizer=column("optimizer_bytes"),
            kept=np.where(column("recompute"), inputs, whole),
            whole=whole,
            handed=handed,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """The rows that a rank ran, in order, over all cycles."""

    chunks: list[int]
    op: npt.NDArray[np.int8]
    chunk: npt.NDArray[np.int16]
    start: Floats
    end: Floats
    arrived: Floats
    opens: npt.NDArray[np.bool_]  # a mini-batch's first weight gradient in its chunk
    dies: npt.NDArray[np.bool_]
    predicts: npt.NDArray[np.bool_]
    forgets: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, program: Program, cycles: list[Cycle], rank: int, spent: Floats) -> _Ran:
        op, chunk, batch = program.op[:, rank], program.chunk[:, rank], program.batch[:, rank]
        chunks, opens = program.schedule.chunks_of(rank), _opens(program, rank)
        live = [cycle.live[:, rank] for cycle in cycles]
        version = batch - program.delay[:, rank]  # in cycle c, version + c; below 0 it is the first one, shared
        dies = program.dies[:, rank]

        def over(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([column[one] for one in live])

        end = np.concatenate([cycle.end[one, rank] for cycle, one in zip(cycles, live, strict=True)])
        ops, where = over(op), over(chunk)
        return cls(
            chunks=chunks,
            op=ops,
            chunk=where,
            start=end - spent[ops, where],
            end=end,
            arrived=np.concatenate([cycle.arrived[one, rank] for cycle, one in zip(cycles, live, strict=True)]),
            opens=over(opens),
            dies=np.concatenate(
                [(dies & (version + cycle.number >= 0))[one] for cycle, one in zip(cycles, live, strict=True)]
            ),
            predicts=over(program.predicts[:, rank]),
            forgets=over(program.forgets[:, rank]),
        )


def _opens(program: Program, rank: int) -> npt.NDArray[np.bool_]:
    """Rows at which a gradient comes into being: a chunk's first of the youngest mini-batch in the cycle."""
    op, chunk, batch = program.op[:, rank], program.chunk[:, rank], program.batch[:, rank]
    retiring = (op == Op.B) | (op == Op.W)
    opens = np.zeros(len(op), np.bool_)
    for one in program.schedule.chunks_of(rank):
        mine = np.flatnonzero(retiring & (chunk == one))
        if mine.size:
            opens[mine[batch[mine].argmax()]] = True
    return opens


def _measure_rank(ran: _Ran, sizes: _Sizes) -> RankMemory:
    chunks = ran.chunks
    forward, update = ran.op == Op.F, ran.op == Op.U
    retiring = (ran.op == Op.B) | (ran.op == Op.W)
    again = (ran.op == Op.B) | (ran.op == Op.I)  # the backward has all activations, recomputed or not
    weight, kept, whole = sizes.weight[ran.chunk], sizes.kept[ran.chunk], sizes.whole[ran.chunk]

    grows = {  # when a row starts, and when it has ended
        "extra_versions": (0.0, weight * update - weight * ran.dies),
        "gradients": (sizes.gradient[ran.chunk] * ran.opens, -sizes.gradient[ran.chunk] * update),
        "activations": (kept * forward + (whole - kept) * again, -whole * retiring),
        "buffers": (weight * ran.predicts, -weight * ran.forgets),
    }
    during, after = {}, {}
    for name, (starts, ends) in grows.items():
        after[name] = np.cumsum(starts + ends)
        during[name] = after[name] - ends
    waiting_end, waiting_start = _waiting(ran, sizes.handed[ran.op, ran.chunk])
    during["buffers"], after["buffers"] = during["buffers"] + waiting_end, after["buffers"] + waiting_start

    totals = [np.sum(list(held.values()), axis=0) for held in (during, after)]
    held, total = max(zip((during, after), totals, strict=True), key=lambda one: one[1].max())
    at_peak = {name: values[total.argmax()] for name, values in held.items()}
    at_peak |= {"weights": sizes.weight[chunks].sum(), "optimizer": sizes.optimizer[chunks].sum()}
    return RankMemory(
        bytes={name: float(at_peak[name]) for name in CATEGORIES},
        in_flight=float((np.cumsum(forward.astype(int) - retiring) + retiring).max()) / len(chunks),
        versions={one: 1 + int(_extra(ran, one).max(initial=0)) for one in chunks},
    )


def _extra(ran: _Ran, chunk: int) -> npt.NDArray[np.integer]:
    """Versions of a chunk beyond the newest, after each of its rows."""
    mine = ran.chunk == chunk
    return np.cumsum((ran.op == Op.U)[mine].astype(int) - ran.dies[mine])


def _waiting(ran: _Ran, size: Floats) -> tuple[Floats, Floats]:
    """Bytes that have arrived and wait: at each row's end, and just before the next row's start."""
    nothing = np.zeros(len(size))
    messages = np.flatnonzero((size > 0) & (ran.arrived > -np.inf))
    if not messages.size:
        return nothing, nothing
    order = messages[ran.arrived[messages].argsort(kind="stable")]
    times, arrived = ran.arrived[order], np.concatenate([[0.0], np.cumsum(size[order])])
    taken = np.zeros(len(size))
    taken[messages] = size[messages]
    taken = np.cumsum(taken)
    following = np.append(ran.start[1:], ran.end[-1])
    return (
        arrived[np.searchsorted(times, ran.end, side="right")] - taken,
        arrived[np.searchsorted(times, following, side="right")] - taken,
    )

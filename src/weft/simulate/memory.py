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
from weft.schedule.actions import BACKWARDS, RETIRING, is_any
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
    sizes = _Sizes.of(program, cost)
    return [_measure_rank(_Ran.of(program, cycles, rank), sizes) for rank in range(program.schedule.stages)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sizes:
    """What an op in a chunk takes and gives, op x chunk in bytes; `weight` and so on are a chunk's own."""

    weight: Floats
    optimizer: Floats
    gradient: Floats
    keeps: Floats  # activations that come with its start
    drops: Floats  # activations that go with its end
    handed: Floats  # the input that it takes over from its neighbour
    spent: Floats  # its time

    @classmethod
    def of(cls, program: Program, cost: Cost) -> _Sizes:
        def column(name: str) -> Floats:
            return np.array([getattr(chunk, name) for chunk in cost.chunks], np.float64)

        whole, inputs = column("activation_bytes"), column("input_bytes")
        kept = np.where(column("recompute"), inputs, whole)  # from forward to backward
        keeps, drops, handed = (np.zeros(program.needs.shape) for _ in range(3))
        keeps[Op.F], keeps[Op.B], keeps[Op.I] = kept, whole - kept, whole - kept
        drops[Op.B], drops[Op.W] = whole, whole
        handed[Op.F, 1:] = inputs[1:]
        for op in BACKWARDS:
            handed[op, :-1] = inputs[1:]
        return cls(
            weight=column("weight_bytes"),
            optimizer=column("optimizer_bytes"),
            gradient=column("gradient_bytes"),
            keeps=keeps,
            drops=drops,
            handed=handed,
            spent=durations(cost),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """The rows that a rank ran, in order, over all cycles."""

    chunks: list[int]
    op: npt.NDArray[np.int8]
    chunk: npt.NDArray[np.int16]
    end: Floats
    arrived: Floats | None
    opens: npt.NDArray[np.bool_]  # a mini-batch's first weight gradient in its chunk
    dies: npt.NDArray[np.bool_]
    predicts: npt.NDArray[np.bool_]
    forgets: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, program: Program, cycles: list[Cycle], rank: int) -> _Ran:
        live = [cycle.live[rank] for cycle in cycles]

        def over(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([column[: one.size][one] for one in live])

        def ran(columns: list[Floats]) -> Floats:
            return np.concatenate([column[rank, one] for column, one in zip(columns, live, strict=True)])

        version = program.batch[rank] - program.delay[rank]  # plus the cycle; below 0 it is the first one, shared
        arrived = [cycle.arrived for cycle in cycles if cycle.arrived is not None]
        return cls(
            chunks=program.schedule.chunks_of(rank),
            op=over(program.op[rank]),
            chunk=over(program.chunk[rank]),
            end=ran([cycle.end for cycle in cycles]),
            arrived=ran(arrived) if arrived else None,
            opens=over(_opens(program, rank)),
            dies=np.concatenate(
                [
                    (program.dies[rank] & (version >= -cycle.number))[: one.size][one]
                    for cycle, one in zip(cycles, live, strict=True)
                ]
            ),
            predicts=over(program.predicts[rank]),
            forgets=over(program.forgets[rank]),
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


def _measure_rank(ran: _Ran, sizes: _Sizes) -> RankMemory:
    forward, update = ran.op == Op.F, ran.op == Op.U
    retiring = is_any(ran.op, RETIRING)
    weight, gradient = sizes.weight[ran.chunk], sizes.gradient[ran.chunk]
    grows = {  # by how much when a row starts, and when it has ended
        "extra_versions": (0.0, weight * (update.astype(np.int8) - ran.dies)),
        "gradients": (gradient * ran.opens, -gradient * update),
        "activations": (sizes.keeps[ran.op, ran.chunk], -sizes.drops[ran.op, ran.chunk]),
        "buffers": (weight * ran.predicts, -weight * ran.forgets),
    }
    during, after = {}, {}
    for name, (starts, ends) in grows.items():
        after[name] = np.cumsum(starts + ends)
        during[name] = after[name] - ends
    if ran.arrived is not None:
        waits_at_end, waits_at_start = _waiting(ran, ran.arrived, sizes)
        during["buffers"], after["buffers"] = during["buffers"] + waits_at_end, after["buffers"] + waits_at_start

    totals = [np.sum(list(held.values()), axis=0) for held in (during, after)]
    held, total = max(zip((during, after), totals, strict=True), key=lambda one: one[1].max())
    at_peak = {name: values[total.argmax()] for name, values in held.items()}
    at_peak |= {"weights": sizes.weight[ran.chunks].sum(), "optimizer": sizes.optimizer[ran.chunks].sum()}
    in_flight = np.cumsum(forward.astype(np.int8) - retiring, dtype=np.int32) + retiring
    return RankMemory(
        bytes={name: float(at_peak[name]) for name in CATEGORIES},
        in_flight=float(in_flight.max()) / len(ran.chunks),
        versions={one: 1 + _most_extra(ran, one) for one in ran.chunks},
    )


def _most_extra(ran: _Ran, chunk: int) -> int:
    """Versions of a chunk beyond the newest, at the most."""
    changes = np.flatnonzero((ran.chunk == chunk) & ((ran.op == Op.U) | ran.dies))
    made = (ran.op[changes] == Op.U).astype(int)
    return int(np.cumsum(made - ran.dies[changes]).max(initial=0))


def _waiting(ran: _Ran, arrived: Floats, sizes: _Sizes) -> tuple[Floats, Floats]:
    """Bytes that have arrived and wait: at each row's end, and just before the next row's start."""
    size = np.where(arrived > -np.inf, sizes.handed[ran.op, ran.chunk], 0.0)
    messages = np.flatnonzero(size)
    order = messages[arrived[messages].argsort(kind="stable")]
    times, there = arrived[order], np.concatenate([[0.0], np.cumsum(size[order])])
    taken = np.cumsum(size)
    next_start = np.append((ran.end - sizes.spent[ran.op, ran.chunk])[1:], ran.end[-1])
    return (
        there[np.searchsorted(times, ran.end, side="right")] - taken,
        there[np.searchsorted(times, next_start, side="right")] - taken,
    )

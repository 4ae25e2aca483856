"""How late the weights are that forwards read, in updates: the largest delay, and the mean over micro-batches.

The delay is that of the version that a forward reads. If it predicts from this version, `ahead` says how far.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.schedule.actions import Op
from weft.schedule.program import Ints, Program
from weft.text import format_count, format_figure


def max_delay(program: Program, chunk: int) -> int:
    return int(_of_forwards(program, program.delay, chunk).max(initial=0))


def mean_delay(program: Program, chunk: int) -> float:
    """The mean over the micro-batches of a mini-batch."""
    delays = _of_forwards(program, program.delay, chunk)
    return float(delays.mean()) if delays.size else 0.0


def max_ahead(program: Program, chunk: int) -> int:
    """How many updates forwards predict beyond the version that they read, at most."""
    return int(_of_forwards(program, program.ahead, chunk).max(initial=0))


def mean_over_chunks(delays: Sequence[float], sizes: Sequence[float]) -> float:
    """The mean delay of a model: each chunk counts by its size; all alike if none has one."""
    total = sum(sizes)
    if not total:
        return sum(delays) / len(delays)
    return sum(delay * size for delay, size in zip(delays, sizes, strict=True)) / total


def delay_text(mean: float, largest: Sequence[int], ahead: Sequence[int]) -> str:
    """The delays of a model in words; `largest` and `ahead` are those of its chunks."""
    predicted = f"; predicted up to {format_count(max(ahead), 'update')} ahead" if any(ahead) else ""
    return f"mean {format_figure(mean)}, largest {max(largest)}{predicted}"


def _of_forwards(program: Program, column: Ints, chunk: int) -> Ints:
    rank = program.schedule.placement[chunk]
    values: Ints = column[rank, (program.op[rank] == Op.F) & (program.chunk[rank] == chunk)]
    return values

"""The text grid: one line a rank, one column a unit of time, each column what runs at its midpoint.

    rank 0  1a 2a .  .  .  .  1A 1A 2A 2A
    rank 1  .  1a 2a 1A 1A .  2A 2A .  .

Midpoints make it robust: times need not be multiples of the column. Colour is an addition only: without its codes
the lines of the ranks are the same.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_right
from itertools import groupby
from typing import NamedTuple

from weft.draw.timeline import colour as colours
from weft.draw.timeline.drawing import PASSES, Look, ordinal, version
from weft.errors import WeftError
from weft.schedule import Block, Op, Schedule, Step, Timeline
from weft.simulate import Cost, action_durations
from weft.text import format_number

PARTS = (1, 2, 3, 4, 5, 6, 8, 10)  # of a forward, that a column may be so that all times fit
LONG = 40  # columns that a block takes at the most

_END, _DIM, _UNDERLINED, _REVERSED = "\x1b[0m", "\x1b[2m", "\x1b[4m", "\x1b[7m"


class _Cell(NamedTuple):
    text: str
    code: str = ""  # of the terminal
    owner: int = 0  # equal for the columns of one block, which are drawn as one bar


def grid(
    timeline: Timeline,
    *,
    width: int = 120,
    colour: bool = False,
    versions: bool = False,
    unit: float | None = None,
) -> str:
    """A grid for the terminal, cut to `width` characters.

    `unit` is the time of a column (default: the shortest forward, or the part of it that all times are multiples
    of), `versions` adds the weights that each block reads: `v1`, or `1+2` where they are predicted.
    """
    look = Look(timeline)
    step, exact = _unit(look, unit)
    total = max(1, math.ceil(look.span / step - 1e-6))
    digits = len(str(len(look.rows) - 1))
    head = len("rank ") + digits + 2
    fitting = min(total, max(1, (width - head + 1) // 2))
    sampled = [_sample(look, row, step, fitting) for row in look.rows]
    shown, cell = _fit(look, sampled, head, width, versions)
    lines = []
    for rank, row in enumerate(sampled):
        lines.append(_line(f"rank {rank:>{digits}}  ", [_work(look, block) for block in row[:shown]], cell, colour))
        if versions:
            lines.append(_line(" " * head, [_weights(block) for block in row[:shown]], cell, colour))
    notes = []
    if shown < total:
        notes.append(
            f"time 0 to {format_number(shown * step)} of {format_number(look.span)} shown; a file (-o) shows all"
        )
    if not exact:
        notes.append(f"times are rounded to columns of {format_number(step)}; a file (-o) is exact")
    steps = [block.step for row in sampled for block in row[:shown] if block is not None]
    notes.append(_legend(look, steps, step, versions))
    if colour:
        notes.append("underlined: odd weight version")
    return "\n".join(lines + [line for note in notes for line in textwrap.wrap(note, width, break_on_hyphens=False)])


def enough(schedule: Schedule, cost: Cost, *, width: int) -> int:
    """Mini-batches that fill a width as an endless run would: none takes less time than its work on a rank."""

    def work(rank: int) -> float:
        mine = [cost.chunks[chunk] for chunk in schedule.chunks_of(rank)]
        return sum(one.forward + one.backward_input + one.backward_weight for one in mine) * schedule.microbatches

    least = min(map(work, range(schedule.stages)))
    if not least:
        return 2
    longest = float(action_durations(cost).max())
    shortest = min((one.forward for one in cost.chunks if one.forward), default=longest)
    column = max(shortest, longest / LONG)  # none is longer
    return 2 + int(width / 3 * column / least)  # and no cell is narrower


def _unit(look: Look, unit: float | None) -> tuple[float, bool]:
    """The time of a column, and whether every block begins and ends with one."""
    times = {time - look.begin for row in look.rows for block in row for time in (block.start, block.end)}

    def fits(one: float) -> bool:
        return all(abs(time / one - round(time / one)) < 1e-6 for time in times)

    if unit is not None:
        if not 0 < unit < math.inf:
            raise WeftError(f"unit, the time of a column, must be above 0 (got {unit}); leave it out for a forward's")
        return unit, fits(unit)
    shortest = look.forwards[0]
    longest = max(block.end - block.start for block in look.timeline.blocks)
    for parts in PARTS:
        if longest * parts <= LONG * shortest and fits(shortest / parts):
            return shortest / parts, True
    return max(shortest, longest / LONG), False


def _sample(look: Look, row: list[Block], unit: float, columns: int) -> list[Block | None]:
    """What runs at the midpoint of each column."""
    timed = [block for block in row if block.end > block.start]
    starts = [block.start for block in timed]
    cells: list[Block | None] = []
    for column in range(columns):
        time = look.begin + (column + 0.5) * unit
        at = bisect_right(starts, time) - 1
        cells.append(timed[at] if at >= 0 and time < timed[at].end else None)
    return cells


def _fit(look: Look, rows: list[list[Block | None]], head: int, width: int, versions: bool) -> tuple[int, int]:
    """How many columns fit the width, and how wide their cells are."""
    best, cell = None, 1
    for column in range(len(rows[0])):
        for block in (row[column] for row in rows):
            if block is not None:
                cell = max(cell, len(look.label(block.step)), len(_short(block.step)) if versions else 0)
        if head + (column + 1) * (cell + 1) - 1 > width:
            break
        best = column + 1, cell
    if best is None:
        raise WeftError(
            f"a grid needs room for the rank and one column (width: {width}, needed: {head + cell}); "
            f"use a width of {head + cell} or more"
        )
    return best


def _work(look: Look, block: Block | None) -> _Cell:
    if block is None:
        return _Cell(".", _DIM)
    step = block.step
    ground = colours.terminal(look.style_of(step).fill)
    code = f"\x1b[38;5;{colours.terminal_ink(ground)};48;5;{ground}m"
    if step.action.op == Op.U:
        code = _REVERSED  # told apart on any ground
    elif step.version % 2:
        code += _UNDERLINED
    return _Cell(look.label(step), code, id(block))


def _weights(block: Block | None) -> _Cell:
    return _Cell("", _DIM) if block is None else _Cell(_short(block.step), _DIM)


def _short(step: Step) -> str:
    """The version in at most three characters, as long as its numbers have one digit."""
    text = version(step)
    return text.lstrip("→v") if "+" in text else text.lstrip("→")


def _line(head: str, cells: list[_Cell], width: int, colour: bool) -> str:
    plain = (head + " ".join(cell.text.ljust(width) for cell in cells)).rstrip()
    if not colour:
        return plain
    parts, at = [plain[: len(head)]], len(head)
    for (code, _), run in groupby(cells, key=lambda cell: (cell.code, cell.owner)):
        end = at + len(list(run)) * (width + 1) - 1
        text = plain[at:end]
        parts.append(f"{code}{text}{_END}{plain[end : end + 1]}" if text else "")
        at = end + 1
    return "".join(parts)


def _legend(look: Look, steps: list[Step], unit: float, versions: bool) -> str:
    words = []
    for op in sorted({step.action.op for step in steps}):
        of = {Op.F: " of micro-batch 1 in the rank's first chunk", Op.U: " of mini-batch 1"}.get(op, "")
        others = [f"{look.letter(op, local)}: {ordinal(local)}" for local in range(1, min(look.most, 4))]
        others += ["…"] if look.most > 4 else []
        told = f" ({', '.join(others)})" if others and op != Op.B else ""
        words.append(f"1{look.letter(op, 0)} {PASSES[op]}{of}{told}")
    words.append(". idle")
    if versions:
        words.append("v1 weight version read")
        if any(step.ahead for step in steps):
            words.append("1+2 version 1 predicted 2 updates ahead")
    return f"{', '.join(words)}; one column = {format_number(unit)}"

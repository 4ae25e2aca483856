"""The text grid: one line per rank, one column per unit of time, each column showing what runs at its midpoint.

    rank 0  1a 2a .  .  .  .  1A 1A 2A 2A
    rank 1  .  1a 2a 1A 1A .  2A 2A .  .

Because of the midpoints, times need not be multiples of the column. Colour only adds escape codes: without them the
lines of the ranks are the same.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_right
from itertools import groupby
from typing import NamedTuple

from weft.draw.timeline import colour as colours
from weft.draw.timeline.drawing import PASS_NAMES, Drawing, ordinal, version
from weft.errors import WeftError
from weft.schedule import Block, Op, Schedule, Step, Timeline
from weft.simulate import Cost, action_durations
from weft.text import format_number

COLUMNS_PER_FORWARD = (1, 2, 3, 4, 5, 6, 8, 10)  # tried in this order, until all times fit
MAX_COLUMNS = 40  # per block

_RESET, _DIM, _UNDERLINED, _REVERSED = "\x1b[0m", "\x1b[2m", "\x1b[4m", "\x1b[7m"


class _Cell(NamedTuple):
    text: str
    code: str = ""  # escape code
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

    `unit` is the time of one column (default: the shortest forward, or a fraction of it that divides all times).
    `versions` adds the weight version that each block reads: `v1`, or `1+2` for a predicted one.
    """
    drawing = Drawing(timeline)
    column_time, exact = _column_time(drawing, unit)
    total = max(1, math.ceil(drawing.span / column_time - 1e-6))
    digits = len(str(len(drawing.rows) - 1))
    head = len("rank ") + digits + 2
    columns = min(total, max(1, (width - head + 1) // 2))
    sampled = [_sample(drawing, row, column_time, columns) for row in drawing.rows]
    shown, cell = _fit(drawing, sampled, head, width, versions)
    lines = []
    for rank, row in enumerate(sampled):
        labels = [_label_cell(drawing, block) for block in row[:shown]]
        lines.append(_line(f"rank {rank:>{digits}}  ", labels, cell, colour))
        if versions:
            lines.append(_line(" " * head, [_version_cell(block) for block in row[:shown]], cell, colour))
    notes = []
    if shown < total:
        end = format_number(shown * column_time)
        notes.append(f"time 0 to {end} of {format_number(drawing.span)} shown; a file (-o) shows all")
    if not exact:
        notes.append(f"times are rounded to columns of {format_number(column_time)}; a file (-o) is exact")
    notes.append(drawing.steady_figures)
    steps = [block.step for row in sampled for block in row[:shown] if block is not None]
    notes.append(_legend(drawing, steps, column_time, versions))
    if colour:
        notes.append("underlined: odd weight version")
    return "\n".join(lines + [line for note in notes for line in textwrap.wrap(note, width, break_on_hyphens=False)])


def enough(schedule: Schedule, cost: Cost, *, width: int) -> int:
    """The number of mini-batches that fills a width: each takes at least the work of the least loaded rank."""

    def work(rank: int) -> float:
        chunks = [cost.chunks[chunk] for chunk in schedule.chunks_of(rank)]
        microbatch = sum(chunk.forward + chunk.backward_input + chunk.backward_weight for chunk in chunks)
        return microbatch * schedule.microbatches

    least_work = min(map(work, range(schedule.stages)))
    if not least_work:
        return 2
    longest = float(action_durations(cost).max())
    shortest = min((chunk.forward for chunk in cost.chunks if chunk.forward), default=longest)
    column_time = max(shortest, longest / MAX_COLUMNS)  # an upper bound
    return 2 + int(width / 3 * column_time / least_work)  # a cell takes at least 3 characters


def _column_time(drawing: Drawing, unit: float | None) -> tuple[float, bool]:
    """The time of a column, and whether every block starts and ends on a column boundary."""
    times = {time - drawing.start for row in drawing.rows for block in row for time in (block.start, block.end)}

    def fits(column_time: float) -> bool:
        return all(abs(time / column_time - round(time / column_time)) < 1e-6 for time in times)

    if unit is not None:
        if not 0 < unit < math.inf:
            raise WeftError(
                f"unit, the time of a column, must be finite and above 0 (got {unit}); omit it for the default"
            )
        return unit, fits(unit)
    shortest = drawing.forward_durations[0]
    longest = max(block.end - block.start for block in drawing.timeline.blocks)
    for columns in COLUMNS_PER_FORWARD:
        if longest * columns <= MAX_COLUMNS * shortest and fits(shortest / columns):
            return shortest / columns, True
    return max(shortest, longest / MAX_COLUMNS), False


def _sample(drawing: Drawing, row: list[Block], column_time: float, columns: int) -> list[Block | None]:
    """The block that runs at the midpoint of each column."""
    timed = [block for block in row if block.end > block.start]
    starts = [block.start for block in timed]
    sampled: list[Block | None] = []
    for column in range(columns):
        time = drawing.start + (column + 0.5) * column_time
        index = bisect_right(starts, time) - 1
        sampled.append(timed[index] if index >= 0 and time < timed[index].end else None)
    return sampled


def _fit(drawing: Drawing, rows: list[list[Block | None]], head: int, width: int, versions: bool) -> tuple[int, int]:
    """How many columns fit the width, and the width of their cells."""
    best, cell = None, 1
    for column in range(len(rows[0])):
        for block in (row[column] for row in rows):
            if block is not None:
                cell = max(cell, len(drawing.label(block.step)), len(_short_version(block.step)) if versions else 0)
        if head + (column + 1) * (cell + 1) - 1 > width:
            break
        best = column + 1, cell
    if best is None:
        raise WeftError(
            f"a grid needs room for the rank and one column (width: {width}, needed: {head + cell}); "
            f"use a width of {head + cell} or more"
        )
    return best


def _label_cell(drawing: Drawing, block: Block | None) -> _Cell:
    if block is None:
        return _Cell(".", _DIM)
    step = block.step
    background = colours.terminal(drawing.style_of(step).fill)
    code = f"\x1b[38;5;{colours.terminal_ink(background)};48;5;{background}m"
    if step.action.op == Op.U:
        code = _REVERSED  # visible in light and dark terminals
    elif step.version % 2:
        code += _UNDERLINED
    return _Cell(drawing.label(step), code, id(block))


def _version_cell(block: Block | None) -> _Cell:
    return _Cell("", _DIM) if block is None else _Cell(_short_version(block.step), _DIM)


def _short_version(step: Step) -> str:
    """The version in at most three characters, as long as its numbers have one digit."""
    text = version(step)
    return text.lstrip("→v") if "+" in text else text.lstrip("→")


def _line(head: str, cells: list[_Cell], width: int, colour: bool) -> str:
    plain = (head + " ".join(cell.text.ljust(width) for cell in cells)).rstrip()
    if not colour:
        return plain
    parts, start = [plain[: len(head)]], len(head)
    for (code, _), bar in groupby(cells, key=lambda cell: (cell.code, cell.owner)):
        end = start + len(list(bar)) * (width + 1) - 1
        text = plain[start:end]
        parts.append(f"{code}{text}{_RESET}{plain[end : end + 1]}" if text else "")
        start = end + 1
    return "".join(parts)


def _legend(drawing: Drawing, steps: list[Step], column_time: float, versions: bool) -> str:
    entries = []
    for op in sorted({step.action.op for step in steps}):
        of = {Op.F: " of micro-batch 1 in the rank's first chunk", Op.U: " of mini-batch 1"}.get(op, "")
        chunks = [f"{drawing.letter(op, local)}: {ordinal(local)}" for local in range(1, min(drawing.max_chunks, 4))]
        chunks += ["…"] if drawing.max_chunks > 4 else []
        other_chunks = f" ({', '.join(chunks)})" if chunks and op != Op.B else ""
        entries.append(f"1{drawing.letter(op, 0)} {PASS_NAMES[op]}{of}{other_chunks}")
    entries.append(". idle")
    if versions:
        entries.append("v1 weight version read")
        if any(step.ahead for step in steps):
            entries.append("1+2 version 1 predicted 2 updates ahead")
    return f"{', '.join(entries)}; one column = {format_number(column_time)}"

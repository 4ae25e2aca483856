"""Panels of horizontal bars, in one, two or three columns, all of one scale.

Panels with the same labels share those on their left, which leaves the bars more room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.draw.axes import TICK, Scale
from weft.draw.sheet import (
    EDGE,
    INNER,
    LINE,
    SIZE,
    Sheet,
    batches,
    block,
    columns,
    measure,
    n,
    stroke,
    wrap,
    write,
)

ROW, BAR = 22.0, 14.0  # height of a row with one line of text, and of its bar
LABEL = 260.0  # width of labels, at most; longer ones are broken into lines
PLOT = 120.0  # width of the part that bars grow in, at least, where there are several columns
SPACE = 8.0  # between a label, a bar and what is written behind it
BETWEEN = 22.0  # panels


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar: the class of its colour, and what it tells under the mouse."""

    kind: str
    value: float
    told: str
    hatched: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar of one part or more, with what is written behind it."""

    label: str
    parts: Sequence[Part]
    text: str
    whiskers: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """How far it reaches below and above zero."""
        total = math.fsum(part.value for part in self.parts)
        low, high = self.whiskers or (total, total)
        return min(0.0, total, low), max(0.0, total, high)

    @property
    def lines(self) -> list[str]:
        return wrap(self.label, LABEL) or [""]

    @property
    def height(self) -> float:
        return max(ROW, len(self.lines) * LINE + 5)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where the pieces of a panel are: labels, then the plot, then room for what is written behind the bars."""

    scale: Scale
    reference: float | None
    columns: int
    shared: bool  # whether labels are written in the first column only
    label: float
    before: float  # room for what is written left of bars below zero
    behind: float
    plot: float

    def left(self, column: int) -> float:
        """Where the plot of a column starts."""
        pitch = self.before + self.plot + self.behind + BETWEEN + (0 if self.shared else self.label)
        return EDGE + self.label + self.before + column * pitch

    def x(self, column: int, value: float) -> float:
        return self.left(column) + self.plot * self.scale.share(value)


def draw(sheet: Sheet, panels: Mapping[str, Sequence[Row]], reference: float | None = None) -> None:
    frame = _frame(panels, reference)
    for some in batches(panels.items(), frame.columns):
        names = [wrap(name, _width(frame, column), bold=True) for column, (name, _) in enumerate(some)]
        top = sheet.y + LINE * max(map(len, names)) + 4 + (LINE if reference is not None else 0)
        below = top
        for column, (lines, (name, rows)) in enumerate(zip(names, some, strict=True)):
            at = frame.left(column) - frame.before - (0 if frame.shared else frame.label)
            for down, line in enumerate(lines):
                sheet.drawn.append(write(at, sheet.y + SIZE + down * LINE, line, "name"))
            bottom = top + sum(row.height for row in rows)
            sheet.drawn += _grid(frame, column, top, bottom)
            sheet.drawn += _bars(frame, column, top, rows)
            below = max(below, bottom + TICK + 8)
            sheet.told.append(f"{name}: " + ", ".join(f"{row.label} {row.text}" for row in rows) + ".")
        sheet.y = below + 16
    sheet.y -= 16


def _frame(panels: Mapping[str, Sequence[Row]], reference: float | None) -> Frame:
    rows = [row for some in panels.values() for row in some]
    ends = [end for row in rows for end in row.ends] + ([] if reference is None else [reference])
    low, high = min(ends), max(ends)
    label = max(measure(line) for row in rows for line in row.lines) + SPACE
    behind = max(measure(row.text) for row in rows) + SPACE
    before = behind if low < 0 else 0.0
    shared = len({tuple(row.label for row in some) for some in panels.values()}) == 1
    for most in (3, 2, 1):
        across = columns(len(panels), most)
        labels = label if shared else label * across
        plot = (INNER - labels - BETWEEN * (across - 1)) / across - before - behind
        if plot >= PLOT:
            break
    return Frame(
        scale=Scale(low, high if high > low else 1.0),
        reference=reference,
        columns=across,
        shared=shared,
        label=label,
        before=before,
        behind=behind,
        plot=plot,
    )


def _width(frame: Frame, column: int) -> float:
    """Of a panel's name."""
    return frame.before + frame.plot + frame.behind + (0 if frame.shared else frame.label)


def _grid(frame: Frame, column: int, top: float, bottom: float) -> list[str]:
    drawn = []
    for value, text in frame.scale.across(frame.plot):
        x = frame.x(column, value)
        drawn.append(stroke("rule" if value else "axis", x, top, x, bottom))
        drawn.append(write(x, bottom + TICK + 4, text, "tick", anchor="middle"))
    if frame.reference is not None:
        x = frame.x(column, frame.reference)
        drawn.append(stroke("reference", x, top - 3, x, bottom))
        drawn.append(write(x, top - 7, f"{frame.reference:g}".replace("-", "−"), "tick", anchor="middle"))
    return drawn


def _bars(frame: Frame, column: int, top: float, rows: Sequence[Row]) -> list[str]:
    drawn, over, y = [], [], top
    for row in rows:
        middle = y + row.height / 2
        if column == 0 or not frame.shared:
            for down, line in enumerate(row.lines):
                baseline = middle + 4.5 + (down - (len(row.lines) - 1) / 2) * LINE
                drawn.append(write(frame.left(column) - frame.before - SPACE, baseline, line, anchor="end"))
        start = 0.0
        for part in row.parts:
            near, far = sorted((frame.x(column, start), frame.x(column, start + part.value)))
            if part.value:
                box = near, middle - BAR / 2, far - near, BAR
                drawn.append(block(part.kind, *box, part.told, hatched=part.hatched))
            start += part.value
        drawn += _whiskers(frame, column, middle, row)
        low, high = row.ends
        if start < 0:
            over.append(write(frame.x(column, low) - SPACE, middle + 4.5, row.text, "value", anchor="end"))
        else:
            over.append(write(frame.x(column, high) + SPACE, middle + 4.5, row.text, "value"))
        y += row.height
    return drawn + over


def _whiskers(frame: Frame, column: int, y: float, row: Row) -> list[str]:
    if not row.whiskers:
        return []
    low, high = (n(frame.x(column, end)) for end in row.whiskers)
    d = f"M{low} {n(y)}H{high}M{low} {n(y - 4)}v8M{high} {n(y - 4)}v8"
    return [f'<path class="whisker" d="{d}"/>']

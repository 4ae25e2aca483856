"""Panels of curves in a grid, each with its axes; the axes' names stand beside the outer panels only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weft.draw.axes import TICK, Scale, exact, rounded, shared
from weft.draw.report.charts import TONES, short
from weft.draw.sheet import (
    EDGE,
    INNER,
    LINE,
    SIZE,
    Sheet,
    batches,
    clean,
    columns,
    dash,
    mark,
    measure,
    n,
    stroke,
    wrap,
    write,
)

Points = Sequence[tuple[float, tuple[float, float, float]]]

FEW = 20  # points of a curve that shows each of them
HEIGHTS = {1: 340.0, 2: 240.0, 3: 180.0}  # of a plot, by the number of columns
PAD = 8.0  # inside a plot, between its ends and those of the scale
SPACE = 8.0  # between a plot and what is written beside it
BETWEEN = 22.0  # panels


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where the plots are."""

    columns: int
    name: float  # width of the name on the left
    ticks: float  # width of what is written along the axis that goes up
    plot: float
    height: float

    def left(self, column: int) -> float:
        return EDGE + self.name + self.ticks + column * (self.plot + BETWEEN + self.ticks)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One panel's plot: its place, and where points lie in it."""

    left: float
    top: float
    width: float
    height: float
    across: Scale
    upward: Scale

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + PAD + (self.width - 2 * PAD) * self.across.share(value)

    def y(self, value: float) -> float:
        return self.bottom - PAD - (self.height - 2 * PAD) * self.upward.share(value)


def draw(
    sheet: Sheet,
    panels: Mapping[str, Mapping[str, Points]],
    tones: Mapping[str, int],
    *,
    names: tuple[str, str],
    log: tuple[bool, bool],
) -> None:
    points = [[point for curve in some.values() for point in curve] for some in panels.values()]
    across = shared([exact((x for x, _ in some), log=log[0]) for some in points])
    upward = shared([rounded((one for _, three in some for one in three), log=log[1]) for some in points])
    frame = _frame(len(panels), upward, names[1])
    everything = zip(panels.items(), across, upward, strict=True)
    for row, some in enumerate(batches(everything, frame.columns)):
        heads = [wrap(name, frame.plot, bold=True) for (name, _), _, _ in some]
        top = sheet.y + LINE * max(map(len, heads)) + 6
        below = top + frame.height + TICK + 8
        _upward_name(sheet, names[1], top, frame)
        for column, (head, ((name, curves), one, other)) in enumerate(zip(heads, some, strict=True)):
            place = Plot(
                left=frame.left(column), top=top, width=frame.plot, height=frame.height, across=one, upward=other
            )
            for down, line in enumerate(head):
                sheet.drawn.append(write(place.left, sheet.y + SIZE + down * LINE, line, "name"))
            sheet.drawn += _axes(place)
            sheet.drawn += _curves(place, curves, tones)
            sheet.told += [f"{name}:", *(_told(*curve) for curve in curves.items())]
            if (row + 1) * frame.columns + column >= len(panels):
                below = max(below, _across_name(sheet, names[0], place))
        sheet.y = below + 14
    sheet.y -= 14


def _frame(panels: int, upward: Sequence[Scale], name: str) -> Frame:
    across = columns(panels, 3)
    height = HEIGHTS[across]
    ticks = max(measure(text, TICK) for scale in upward for _, text in scale.upward(height - 2 * PAD)) + SPACE
    left = len(wrap(name, height)) * LINE + 4
    plot = (INNER - left - BETWEEN * (across - 1) - 6) / across - ticks
    return Frame(columns=across, name=left, ticks=ticks, plot=plot, height=height)


def _axes(plot: Plot) -> list[str]:
    drawn = []
    for value, text in plot.upward.upward(plot.height - 2 * PAD):
        y = plot.y(value)
        drawn.append(stroke("rule", plot.left, y, plot.left + plot.width, y))
        drawn.append(write(plot.left - SPACE, y + 4, text, "tick", anchor="end"))
    for value, text in plot.across.across(plot.width - 2 * PAD):
        x = plot.x(value)
        drawn.append(stroke("rule", x, plot.top, x, plot.bottom))
        drawn.append(write(x, plot.bottom + TICK + 4, text, "tick", anchor="middle"))
    drawn.append(stroke("axis", plot.left, plot.bottom, plot.left + plot.width, plot.bottom))
    return drawn


def _curves(plot: Plot, curves: Mapping[str, Points], tones: Mapping[str, int]) -> list[str]:
    bands, drawn, marks = [], [], []
    for name, points in curves.items():
        tone = tones[name]
        if any(low < high for _, (low, _, high) in points):
            around = [(x, high) for x, (_, _, high) in points] + [(x, low) for x, (low, _, _) in reversed(points)]
            bands.append(f'<path class="band f{tone % TONES}" d="{_path(plot, around)}Z"/>')
        middle = [(x, value) for x, (_, value, _) in points]
        told = f"<title>{escape(clean(name))}</title>"
        kind = f"curve t{tone % TONES}"
        drawn.append(f'<path class="{kind}"{dash(tone)} d="{_path(plot, middle)}">{told}</path>')
        if len(points) <= FEW:
            marks += [mark(tone, plot.x(x), plot.y(value)) for x, value in middle]
    return bands + drawn + marks


def _path(plot: Plot, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{n(plot.x(x), 1)} {n(plot.y(y), 1)}" for x, y in points)


def _told(name: str, points: Points) -> str:
    (start, (_, first, _)), (end, (_, last, _)) = points[0], points[-1]
    return f"{name} from {short(first)} at {short(start)} to {short(last)} at {short(end)}."


def _upward_name(sheet: Sheet, name: str, top: float, frame: Frame) -> None:
    """Beside a row of panels, turned."""
    middle = top + frame.height / 2
    for down, line in enumerate(wrap(name, frame.height)):
        turned = f' transform="rotate(-90 {n(EDGE + SIZE + down * LINE)} {n(middle)})"'
        sheet.drawn.append(write(EDGE + SIZE + down * LINE, middle, line, "muted", anchor="middle", more=turned))


def _across_name(sheet: Sheet, name: str, plot: Plot) -> float:
    """Below the last panel of a column; its lower end."""
    y = plot.bottom + TICK + 8
    for line in wrap(name, plot.width):
        y += LINE
        sheet.drawn.append(write(plot.left + plot.width / 2, y - 3, line, "muted", anchor="middle"))
    return y

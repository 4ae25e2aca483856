"""Plots of the pages, made by matplotlib: horizontal bars, stacked bars and curves, in panels of one figure.

matplotlib is imported when the first plot is made: lists, tables and ranks do without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.rendering.sheet import CHARACTER, WIDTH, Layout, Sheet, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = float | tuple[float, float, float]  # a number, or (low, median, high)

BAR = 0.21  # inches, the height of a row of bars
CURVES = 1.75  # the height of a panel of curves
FEW_POINTS = 20  # a curve of up to this many points shows each of them
BAR_COLOUR = "#4393c3"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")


def bars(
    title: str,
    panels: Mapping[str, Mapping[str, Value]],
    *,
    unit: str,
    digits: int = 2,
    reference: float | None = None,
) -> str:
    """Horizontal bars with their values; whiskers for (low, median, high), a dashed line at `reference`.

    All panels have one scale and the same rows; a label that a panel does not have leaves its row empty.
    """
    labels = _union(panels.values())
    ends = [end for panel in panels.values() for value in panel.values() for end in _ends(value)]
    texts = [_number(_ends(value)[1], digits) for panel in panels.values() for value in panel.values()]
    subtitle = unit if reference is None else f"{unit}; dashed: {reference:g}"
    with style():
        sheet = Sheet(title, subtitle, _row_layout(labels, len(panels)), panels)
        for name, panel, axes in sheet.panels():
            _rows(axes, name, labels, first=sheet.in_first_column(name), ends=ends, texts=texts)
            if reference is not None:
                axes.axvline(reference, color="#222222", linestyle="--", linewidth=1)
            rows = {labels.index(label): _ends(value) for label, value in panel.items()}
            axes.barh(list(rows), [median for _, median, _ in rows.values()], height=0.62, color=BAR_COLOUR)
            _whiskers(axes, {row: ends for row, ends in rows.items() if ends[0] < ends[2]})
            for row, (_, median, high) in rows.items():
                _write_value(axes, max(0.0, high), row, _number(median, digits))
        return sheet.svg()


def _whiskers(axes: Axes, rows: Mapping[int, tuple[float, float, float]]) -> None:
    if rows:
        medians = [median for _, median, _ in rows.values()]
        lengths = [
            [median - low for low, median, _ in rows.values()],
            [high - median for _, median, high in rows.values()],
        ]
        axes.errorbar(medians, list(rows), xerr=lengths, fmt="none", ecolor="#222222", capsize=2, elinewidth=1)


def stacks(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, unit: str, digits: int = 1) -> str:
    """Horizontal bars made of parts, with their sums and a legend of the parts that occur. One scale, the same rows.

    A part has the colour of its place, so the same list of parts has the same colours in every plot.
    """
    labels = _union(panels.values())
    parts = _union(stack for panel in panels.values() for stack in panel.values())
    occur = [part for part in parts if any(stack.get(part) for panel in panels.values() for stack in panel.values())]
    sums = [math.fsum(stack.values()) for panel in panels.values() for stack in panel.values()]
    texts = [_number(total, digits) for total in sums]
    with style():
        sheet = Sheet(title, unit, _row_layout(labels, len(panels)), panels, legend=occur)
        handles = {}
        for name, panel, axes in sheet.panels():
            _rows(axes, name, labels, first=sheet.in_first_column(name), ends=sums, texts=texts)
            rows, starts = [labels.index(label) for label in panel], [0.0] * len(panel)
            for part, colour in zip(parts, COLOURS, strict=False):
                widths = [stack.get(part, 0.0) for stack in panel.values()]
                handles[part] = axes.barh(
                    rows, widths, left=starts, height=0.68, color=colour, edgecolor="white", linewidth=0.6
                )
                starts = [start + width for start, width in zip(starts, widths, strict=True)]
            for row, end in zip(rows, starts, strict=True):
                _write_value(axes, end, row, _number(end, digits))
        sheet.legend({part: handles[part] for part in occur})
        return sheet.svg()


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    powers_of_two: bool = False,
    pairs: bool = False,
) -> str:
    """Curves with a legend; panels share the horizontal scale. `powers_of_two`: a logarithmic horizontal axis.

    `pairs`: two panels a row; all share the vertical scale, too, with a line at zero.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

    names = _union(panels.values())
    across = [at for panel in panels.values() for points in panel.values() for at, _ in points]
    columns = 2 if pairs else _columns(len(panels))
    layout = Layout(columns=columns, height=CURVES, left=0.65, between=0.45, below=0.42)
    low, high = _range([value for panel in panels.values() for points in panel.values() for _, value in points])
    with style():
        sheet = Sheet(title, "", layout, panels, legend=names)
        handles = {}
        for name, panel, axes in sheet.panels():
            axes.set_title(name)
            if pairs:
                axes.set_ylim(low, high)
                axes.axhline(0, color="#888888", linewidth=0.8)
            if powers_of_two:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_locator(FixedLocator([4.0**power for power in range(16)]))
                axes.xaxis.set_minor_locator(NullLocator())
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.set_xlim(min(across) / 1.3, max(across) * 1.3)
            else:
                axes.xaxis.set_major_locator(MaxNLocator(5))
                axes.set_xlim(min(across) - 0.02 * max(across), 1.02 * max(across))
            for curve, points in panel.items():
                at = names.index(curve)
                (handles[curve],) = axes.plot(
                    [across for across, _ in points],
                    [value for _, value in points],
                    color=COLOURS[at % len(COLOURS)],
                    linestyle=DASHES[at % len(DASHES)],
                    marker=MARKERS[at % len(MARKERS)] if len(points) <= FEW_POINTS else None,
                    markersize=7 if pairs else 4,
                    markeredgecolor="white",
                    markeredgewidth=0.5,
                    linewidth=1.5,
                )
            axes.tick_params(labelsize=8, length=0)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            if sheet.in_first_column(name):
                axes.set_ylabel(y)
            if sheet.is_lowest(name):
                axes.set_xlabel(x)
        sheet.legend({curve: handles[curve] for curve in names})
        return sheet.svg()


def _union(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names, in the order of the largest group."""
    largest_first = sorted(groups, key=len, reverse=True)
    return list(dict.fromkeys(name for group in largest_first for name in group))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the largest and zero, with room at both ends."""
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.08 * (high - low or 1.0)
    return low - room, high + room


def _number(value: float, digits: int) -> str:
    """With a fixed number of digits, and without a minus before a zero."""
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def _ends(value: Value) -> tuple[float, float, float]:
    return value if isinstance(value, tuple) else (value, value, value)


def _columns(panels: int) -> int:
    return 2 if panels in (2, 4) else min(3, panels)


def _rows(
    axes: Axes, name: str, labels: Sequence[str], *, first: bool, ends: Sequence[float], texts: Sequence[str]
) -> None:
    """An axis of bars: rows from the top down, and room for the values behind the longest bar."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(name)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels if first else [""] * len(labels))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.axvline(0, color="#888888", linewidth=0.8)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)
    low, high = min(0.0, *ends), max(0.0, *ends)
    width = axes.get_position().width * WIDTH
    room = min(0.5, (CHARACTER * max(map(len, texts)) + 0.12) / width)
    axes.set_xlim(low - 0.01 * (high - low), low + ((high - low) or 1.0) / (1 - room))
    axes.set_xticks([tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high])


def _write_value(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center_baseline", fontsize=8, bbox=box, zorder=3
    )


def _row_layout(labels: Sequence[str], panels: int) -> Layout:
    left = 0.1 + CHARACTER * max(map(len, labels))
    return Layout(columns=_columns(panels), height=BAR * len(labels) + 0.06, left=left)

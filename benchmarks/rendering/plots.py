"""Plots of the pages, made by matplotlib: horizontal bars, stacked bars and curves, in panels of one figure.

Equal numbers give equal bytes: fixed style, fixed layout, no date, ids from a fixed salt. Text stays text, so that a
plot can be searched. matplotlib is imported when the first plot is made: lists, tables and ranks do without.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = float | tuple[float, float, float]  # a number, or (low, median, high)

WIDTH = 9.4  # inches, as all lengths here
MARGIN = 0.15
TITLE, SUBTITLE, LEGEND_LINE = 0.3, 0.27, 0.24
PANEL_TITLE, AXIS = 0.34, 0.32  # above a panel; below it, for the numbers of the axis
GAP = 0.3  # between columns of panels
BAR = 0.21  # a row of bars
CURVES = 1.75  # the height of a panel of curves
CHARACTER = 0.078  # the width of one, on average and rounded up
FEW_POINTS = 20  # a curve of up to this many points shows each of them
BAR_COLOUR = "#4393c3"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.labelcolor": "#555555",
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "xtick.color": "#888888",
    "ytick.color": "#888888",
    "xtick.labelcolor": "#555555",
    "ytick.labelcolor": "#222222",
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
}


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
    with _style():
        sheet = _Sheet(title, subtitle, _row_layout(labels, len(panels)), panels)
        for name, panel, axes in sheet.panels():
            _rows(axes, name, labels, first=sheet.in_first_column(name), ends=ends, texts=texts)
            if reference is not None:
                axes.axvline(reference, color="#222222", linestyle="--", linewidth=1)
            for label, value in panel.items():
                low, median, high = _ends(value)
                at = labels.index(label)
                axes.barh(at, median, height=0.62, color=BAR_COLOUR)
                if low < high:
                    whiskers = [[median - low], [high - median]]
                    axes.errorbar(median, at, xerr=whiskers, color="#222222", capsize=2, linewidth=1)
                _write_value(axes, max(0.0, high), at, _number(median, digits))
        return sheet.svg()


def stacks(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, unit: str, digits: int = 1) -> str:
    """Horizontal bars made of parts, with their sums and a legend of the parts. One scale, the same rows."""
    labels = _union(panels.values())
    parts = _union(stack for panel in panels.values() for stack in panel.values())
    sums = [math.fsum(stack.values()) for panel in panels.values() for stack in panel.values()]
    texts = [_number(total, digits) for total in sums]
    with _style():
        sheet = _Sheet(title, unit, _row_layout(labels, len(panels)), panels, legend=parts)
        handles = {}
        for name, panel, axes in sheet.panels():
            _rows(axes, name, labels, first=sheet.in_first_column(name), ends=sums, texts=texts)
            for label, stack in panel.items():
                at, start = labels.index(label), 0.0
                for part in (known for known in parts if known in stack):
                    number = parts.index(part)
                    handles[part] = axes.barh(
                        at,
                        stack[part],
                        left=start,
                        height=0.68,
                        color=COLOURS[number % len(COLOURS)],
                        edgecolor="white",
                        linewidth=0.6,
                        hatch="///" if number >= len(COLOURS) else None,
                    )
                    start += stack[part]
                _write_value(axes, start, at, _number(math.fsum(stack.values()), digits))
        sheet.legend({part: handles[part] for part in parts})
        return sheet.svg()


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    powers_of_two: bool = False,
) -> str:
    """Curves with a legend; panels share the horizontal scale. `powers_of_two`: a logarithmic horizontal axis."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    names = _union(panels.values())
    across = [at for panel in panels.values() for points in panel.values() for at, _ in points]
    layout = _Layout(columns=_columns(len(panels)), height=CURVES, left=0.65, between=0.45, below=0.42)
    with _style():
        sheet = _Sheet(title, "", layout, panels, legend=names)
        handles = {}
        for name, panel, axes in sheet.panels():
            axes.set_title(name)
            if powers_of_two:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_locator(FixedLocator([4.0**power for power in range(16)]))
                axes.xaxis.set_minor_locator(NullLocator())
                axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.set_xlim(min(across) / 1.3, max(across) * 1.3)
            else:
                axes.set_xlim(min(across) - 0.02 * max(across), 1.02 * max(across))
            for curve, points in panel.items():
                at = names.index(curve)
                (handles[curve],) = axes.plot(
                    [across for across, _ in points],
                    [value for _, value in points],
                    color=COLOURS[at % len(COLOURS)],
                    linestyle=DASHES[at % len(DASHES)],
                    marker=MARKERS[at % len(MARKERS)] if len(points) <= FEW_POINTS else None,
                    markersize=4,
                    markeredgecolor="white",
                    markeredgewidth=0.5,
                    linewidth=1.5,
                )
            axes.tick_params(labelsize=8, length=0)
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


def _number(value: float, digits: int) -> str:
    """With a fixed number of digits, and without a minus before a zero."""
    return f"{round(value, digits) + 0.0:,.{digits}f}"


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


# Layout


@dataclass(frozen=True, kw_only=True)
class _Layout:
    columns: int
    height: float  # of a panel
    left: float  # before the first column
    between: float = 0.0  # columns, beside GAP
    below: float = 0.0  # the lowest panels, beside AXIS


def _row_layout(labels: Sequence[str], panels: int) -> _Layout:
    left = 0.1 + CHARACTER * max(map(len, labels))
    return _Layout(columns=_columns(panels), height=BAR * len(labels) + 0.06, left=left)


class _Sheet:
    """A figure with a title, room for a legend, and panels at fixed places."""

    def __init__(
        self, title: str, subtitle: str, layout: _Layout, panels: Mapping[str, Any], legend: Sequence[str] = ()
    ) -> None:
        from matplotlib.figure import Figure

        self._layout, self._panels = layout, panels
        self._places = {name: place for place, name in enumerate(panels)}
        rows = -(-len(panels) // layout.columns)
        head = SUBTITLE if subtitle else 0.06
        self._legend_at = MARGIN + TITLE + head
        self._legend_columns = _legend_columns(legend) if legend else 1
        legend_lines = -(-len(legend) // self._legend_columns)
        self._top = self._legend_at + LEGEND_LINE * legend_lines
        self._row = PANEL_TITLE + layout.height + AXIS
        self._height = self._top + rows * self._row + layout.below + MARGIN
        self._figure = Figure(figsize=(WIDTH, self._height), facecolor="white")
        self._write(title, MARGIN + TITLE / 2, size=12.5, weight="bold", colour="#111111")
        self._write(subtitle, MARGIN + TITLE + SUBTITLE / 2, size=9, weight="normal", colour="#555555")

    def _write(self, text: str, down: float, *, size: float, weight: str, colour: str) -> None:
        at = MARGIN / WIDTH, 1 - down / self._height
        self._figure.text(*at, text, fontsize=size, fontweight=weight, color=colour, va="center_baseline")

    def panels(self) -> Iterator[tuple[str, Any, Axes]]:
        """Each with its name and its axes."""
        layout = self._layout
        gaps = (GAP + layout.between) * (layout.columns - 1)
        width = (WIDTH - 2 * MARGIN - layout.left - gaps) / layout.columns
        for name, place in self._places.items():
            row, column = divmod(place, layout.columns)
            left = MARGIN + layout.left + column * (width + GAP + layout.between)
            bottom = self._height - self._top - row * self._row - PANEL_TITLE - layout.height
            box = left / WIDTH, bottom / self._height, width / WIDTH, layout.height / self._height
            yield name, self._panels[name], self._figure.add_axes(box)

    def in_first_column(self, panel: str) -> bool:
        return self._places[panel] % self._layout.columns == 0

    def is_lowest(self, panel: str) -> bool:
        """Whether no panel is below it."""
        return self._places[panel] + self._layout.columns >= len(self._places)

    def legend(self, handles: Mapping[str, Any]) -> None:
        """In the room between title and panels."""
        self._figure.legend(
            list(handles.values()),
            list(handles),
            loc="upper left",
            bbox_to_anchor=(MARGIN / WIDTH, 1 - self._legend_at / self._height),
            ncols=self._legend_columns,
            columnspacing=1.6,
            handlelength=2.4,
        )

    def svg(self) -> str:
        text = io.StringIO()
        self._figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _legend_columns(names: Sequence[str]) -> int:
    key, width = 0.65, WIDTH - 2 * MARGIN  # of the sample beside a name, and of the legend
    if sum(key + CHARACTER * len(name) for name in names) <= width:
        return len(names)
    return max(1, int(width / (key + CHARACTER * max(map(len, names)))))


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's defaults and STYLE, whatever the user has configured."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield

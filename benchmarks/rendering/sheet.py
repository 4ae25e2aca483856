"""A figure of panels at fixed places, in a fixed style, and its SVG.

Equal numbers give equal bytes: no layout solver, no user settings, no date, ids from a fixed salt. Text stays text, so
that a plot can be searched.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 9.4  # inches, as all lengths here
MARGIN = 0.15
TITLE, SUBTITLE, LEGEND_LINE = 0.3, 0.27, 0.24
PANEL_TITLE, AXIS = 0.34, 0.32  # above a panel; below it, for the numbers of the axis
GAP = 0.3  # between columns of panels
CHARACTER = 0.078  # the width of one, on average and rounded up
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.titley": 1.0,
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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of panels, and lengths in inches."""

    columns: int
    height: float  # of a panel
    left: float  # before the first column
    between: float = 0.0  # columns, beside GAP
    below: float = 0.0  # the lowest panels, beside AXIS


class Sheet:
    """A figure with a title, room for a legend, and panels at fixed places."""

    def __init__(
        self, title: str, subtitle: str, layout: Layout, panels: Mapping[str, Any], legend: Sequence[str] = ()
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
def style() -> Iterator[None]:
    """matplotlib's defaults and STYLE, whatever the user has configured."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield

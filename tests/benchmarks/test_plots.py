"""Plots: equal bytes for equal numbers; bars and curves where their numbers are; no text over another."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, cast

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.rendering import bars, lines, stacks
from benchmarks.rendering.plots import COLOURS
from benchmarks.rendering.sheet import Sheet

LABELS = ["weft wpipe", "torch InterleavedZeroBubble", "data parallelism <DDP>", *(f"contender {n}" for n in range(4))]
RATIOS = {
    f"m = {m}": {label: (0.9 * (at + m) / 25, (at + m) / 25, 1.05 * (at + m) / 25) for at, label in enumerate(LABELS)}
    for m in (2, 4)
}
MEMORY = {
    panel: {method: {f"part {part}": float(part * size) for part in range(5)} for size, method in enumerate(LABELS, 1)}
    for panel in ("transformer", "convolutions")
}
LOSSES = {
    f"task {task}": {
        f"method {method}": [(100.0 * step, 2.5 * math.exp(-step / (5 + method)) + 0.2) for step in range(25)]
        for method in range(5)
    }
    for task in range(4)
}
PLOTS: dict[str, Callable[[], str]] = {
    "ratios": lambda: bars("Throughput", RATIOS, unit="share of the limit", reference=0.95),
    "differences": lambda: bars(
        "Differences", {panel: {f"x {at}": at - 3.0 for at in range(7)} for panel in "abc"}, unit="%"
    ),
    "zeros": lambda: bars("Zeros", {"": {"a": 0.0, "b": 0.0}}, unit="s"),
    "memory": lambda: stacks("Memory", MEMORY, unit="MiB"),
    "losses": lambda: lines("Loss", LOSSES, x="updates", y="loss"),
    "batches": lambda: lines(
        "Batches", {"a": {"x": [(1, 5), (64, 300)], "y": [(512, 7)]}}, x="batch", y="samples/s", powers_of_two=True
    ),
}


@pytest.fixture
def figure_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str]], Figure]:
    """The figure of a plot instead of its text, drawn once."""

    def figure(make: Callable[[], str]) -> Figure:
        with monkeypatch.context() as patched:
            patched.setattr(Sheet, "svg", lambda self: self._figure)
            made = cast(Figure, make())
        FigureCanvasAgg(made).draw()  # type: ignore[no-untyped-call]
        return made

    return figure


def texts_of(figure: Figure) -> list[Text]:
    """All texts; those of an axis without the numbers beyond its ends, which are not drawn."""
    found = [text for text in cast(list[Text], figure.findobj(Text)) if text.get_text()]
    beyond: set[Text] = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    return [text for text in found if text not in beyond]


@pytest.mark.parametrize("name", PLOTS)
def test_equal_numbers_give_equal_bytes(name: str) -> None:
    """Whatever the user has configured; nothing in the file depends on the date."""
    first = PLOTS[name]()
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.fonttype": "path"}):
        assert PLOTS[name]() == first
    assert "<dc:date>" not in first
    assert 'style="fill: #ffffff"' in first  # a light background


@pytest.mark.parametrize("name", PLOTS)
def test_texts_neither_overlap_nor_leave_the_figure(name: str, figure_of: Any) -> None:
    figure = figure_of(PLOTS[name])
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts_of(figure)]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, text
    for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
        over = (
            min(box.x1, other_box.x1) - max(box.x0, other_box.x0),
            min(box.y1, other_box.y1) - max(box.y0, other_box.y0),
        )
        assert min(over) <= 1, (text, other)  # pixel


def test_every_label_and_value_is_text() -> None:
    svg = PLOTS["ratios"]()
    assert all(f">{label}<" in svg for label in LABELS if "<" not in label)
    assert "data parallelism &lt;DDP&gt;" in svg
    assert all(f">{panel}<" in svg for panel in RATIOS)
    assert all(f">{median:.2f}<" in svg for panel in RATIOS.values() for _, median, _ in panel.values())
    assert ">share of the limit; dashed: 0.95<" in svg
    svg = PLOTS["memory"]()
    assert all(f">{text}<" in svg for text in ("part 1", "part 4", "MiB", "transformer", "convolutions", "70.0"))
    svg = PLOTS["losses"]()
    assert all(f">{text}<" in svg for text in (*LOSSES, "method 0", "method 4", "updates", "loss"))


def test_bars_are_as_long_as_their_values_on_one_scale(figure_of: Any) -> None:
    figure = figure_of(PLOTS["ratios"])
    for axes, panel in zip(figure.axes, RATIOS.values(), strict=True):
        assert [bar.get_width() for bar in axes.patches] == [median for _, median, _ in panel.values()]
        _, whiskers = axes.containers
        segments = [segment[:, 0].tolist() for segment in whiskers.lines[2][0].get_segments()]
        assert segments == [pytest.approx([low, high]) for low, _, high in panel.values()]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_missing_label_leaves_its_row_empty(figure_of: Any) -> None:
    first, second = figure_of(lambda: bars("", {"a": {"y": 2.0}, "b": {"x": -2.0, "y": 4.0}}, unit="")).axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["x", "y"]
    assert [bar.get_y() + bar.get_height() / 2 for bar in first.patches] == [1.0]
    assert [bar.get_width() for bar in second.patches] == [-2.0, 4.0]


def test_parts_of_a_bar_follow_each_other(figure_of: Any) -> None:
    (axes,) = figure_of(lambda: stacks("", {"": {"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0}}}, unit="MiB")).axes
    x, no_x, y, other_y = axes.patches
    assert [(bar.get_x(), bar.get_width()) for bar in (x, y)] == [(0.0, 1.0), (1.0, 3.0)]
    assert [(bar.get_x(), bar.get_width()) for bar in (no_x, other_y)] == [(0.0, 0.0), (0.0, 2.0)]
    assert x.get_facecolor() != y.get_facecolor() == other_y.get_facecolor()


def test_a_part_that_no_bar_has_keeps_its_colour_and_is_not_in_the_legend(figure_of: Any) -> None:
    figure = figure_of(lambda: stacks("", {"": {"a": {"x": 1.0, "none": 0.0, "y": 3.0}}}, unit="MiB"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]
    assert figure.axes[0].patches[-1].get_facecolor() == to_rgba(COLOURS[2])


def test_curves_pass_through_their_points_and_keep_their_look(figure_of: Any) -> None:
    figure = figure_of(PLOTS["losses"])
    looks: dict[str, set[tuple[str, str]]] = {}
    for axes, panel in zip(figure.axes, LOSSES.values(), strict=True):
        for line, (name, points) in zip(axes.lines, panel.items(), strict=True):
            assert list(zip(*line.get_data(), strict=True)) == points
            looks.setdefault(name, set()).add((str(line.get_color()), str(line.get_linestyle())))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(looks)


def test_pairs_share_a_scale_with_a_zero(figure_of: Any) -> None:
    panels = {"a": {"x": [(1.0, 2.0)]}, "b": {"x": [(1.0, 3.0)]}, "c": {"y": [(2.0, 4.0)]}}
    figure = figure_of(lambda: lines("", panels, x="", y="", pairs=True))
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    low, high = figure.axes[0].get_ylim()
    assert low < 0 < 4 < high
    assert len({axes.get_position().x0 for axes in figure.axes}) == 2


def test_numbers_have_no_minus_before_a_zero() -> None:
    svg = bars("", {"": {"a": -0.001, "b": -0.2, "c": 1234.5}}, unit="", digits=1)
    assert re.findall(r">([−\d.,]+)</text>", svg)[-3:] == ["0.0", "−0.2", "1,234.5"]

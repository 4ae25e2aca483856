"""Charts of the report as inline SVG: line charts, and stacked bars per rank.

A chart must be readable on a phone, on a wide screen and on paper, without a script. Its SVG therefore fills the
available width: positions are percentages, curves are in a stretched inner SVG whose strokes keep their width, and text
keeps its size. Colours are variables of `report.css`: `--tone-0` … for groups, `--part-0` … for parts of bars. Curves
of different groups also differ in dashes and markers, for greyscale prints and colour-blind readers.

Every chart is accessible as text too: a title, a one-sentence description and a folded table of its data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from weft.text import format_number

TONES = 8  # colours for groups; more groups repeat them
ROW, AXIS = 24, 22  # height of a bar with its gap, and of the axis below
TABLE_ROWS = 120  # approximate maximum for the table of a chart

DASHES = ("", "8 3", "3 2", "10 3 2 3", "5 5", "14 3", "2 5", "10 3 2 3 2 3")
MARKS = ("circle", "square", "diamond", "triangle")
SHAPES = {"square": "M-3.5-3.5h7v7h-7z", "diamond": "M0-5L5 0L0 5L-5 0z", "triangle": "M0-5L5 4H-5z"}
_SCALES = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # threshold, divisor, suffix
_STRETCH = 'viewBox="0 0 1000 1000" preserveAspectRatio="none"'


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a line chart."""

    name: str
    points: Sequence[tuple[float, float]]
    tone: int  # index of its colour
    weight: str = "main"  # "thin": a single run below its group's mean; "faint": not smoothed
    markers: bool = False  # a marker at each point


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The bar of one rank: the values of its parts, in the order of the chart's parts, and the text beside it."""

    label: str
    values: Sequence[float]
    text: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between `low` and `high`, at most `about` + 1."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """The texts of ticks, all with the same suffix: `0 20k 40k`."""
    most = max(map(abs, values))
    divisor, suffix = next(((by, suffix) for threshold, by, suffix in _SCALES if most >= threshold), (1.0, ""))
    return [short(value / divisor) + (suffix if value else "") for value in values]


def short(value: float) -> str:
    """A number in a few characters: `3e-4`, `0.0125`, `1.482`."""
    text = f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−") if value else "0"


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    cut: float = 12.0,
    reference: tuple[str, float] | None = None,
    note: str = "",
) -> str:
    """A line chart, or an empty string without points. `x_label` and `y_label` name the axes with their units.

    If all values span more than `cut` times the range of the lower 85%, the y axis is cut and a note says so: a run
    that diverges must not flatten the others.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    right = max(x for curve in curves for x, _ in curve.points) or 1.0
    left = min(0.0, min(x for curve in curves for x, _ in curve.points))
    values = sorted(y for curve in curves for _, y in curve.points)
    low, high = _range(values, reference, from_zero, cut)
    is_cut = values[-1] > high * (1 + 1e-9)
    if is_cut:
        note = f"{note} The axis is cut: values go up to {short(values[-1])}.".strip()

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), (high - y) / (high - low)

    drawn = [*_axes(left, right, low, high), *_axis_labels(x_label, y_label)]
    if reference:
        drawn += _reference(reference[0], place(left, reference[1])[1])
    paths = (_path(curve, [place(*point) for point in curve.points]) for curve in curves)
    overflow = "hidden" if is_cut else "visible"
    drawn.append(f'<svg width="100%" height="100%" {_STRETCH} overflow="{overflow}">{"".join(paths)}</svg>')
    for curve in curves:
        if curve.markers or len(curve.points) == 1:
            drawn += [_mark(curve.tone, *place(x, y)) for x, y in curve.points if y <= high]
    main = [_curve_description(curve) for curve in curves if curve.weight == "main"]
    description = f"{y_label} against {x_label}. " + ". ".join(main)
    box = f'data-x="{left:.9g} {right:.9g}" data-y="{low:.9g} {high:.9g}" data-x-label="{escape(x_label)}"'
    picture = f'<div class="plot">{_svg(title, description, "".join(drawn), f"class=curves {box}")}</div>'
    entries = [f"<li>{_legend_sample(curve)}{escape(curve.name)}</li>" for curve in curves if curve.weight != "thin"]
    legend = f'<ul class="legend">{"".join(entries)}</ul>' if len(curves) > 1 else ""
    return _figure(title, legend, picture, note, _curve_table(curves, x_label, y_label))


def bar_chart(
    title: str,
    panels: Sequence[tuple[str, Sequence[Bar]]],
    *,
    parts: Sequence[str],
    x_label: str,
    colours: Sequence[int] | None = None,
    note: str = "",
) -> str:
    """Stacked bars, a panel per group, all with the same scale. `x_label` names the axis with its unit.

    `colours` are the indices of the parts' colours, which are 0, 1, … by default.
    """
    colours = range(len(parts)) if colours is None else colours
    panels = [(name, rows) for name, rows in panels if rows]
    if not panels:
        return ""
    top = max(sum(bar.values) for _, rows in panels for bar in rows) or 1.0
    marks = ticks(0, top, 4)
    shown = []
    for name, rows in panels:
        bottom, drawn = len(rows) * ROW, []
        for value, text in zip(marks, labels(marks), strict=True):
            x = _percent(value / top)
            drawn.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
            drawn.append(f'<text class="tick" x="{x}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
        drawn += [_bar(bar, row, top, parts, colours) for row, bar in enumerate(rows)]
        description = f"{x_label}. " + ". ".join(f"{bar.label}: {bar.text}" for bar in rows)
        panel_title = f"{title}, {name}" if name else title
        picture = _svg(panel_title, description, "".join(drawn), f'style="height:{bottom + AXIS}px"')
        head = f"<h4>{escape(name)}</h4>" if name else ""
        shown.append(f'<div class="panel">{head}<div class="bars">{picture}</div></div>')
    entries = [
        f'<li><i style="background:var(--part-{colour})"></i>{escape(part)}</li>'
        for part, colour in zip(parts, colours, strict=True)
    ]
    legend = f'<ul class="legend">{"".join(entries)}</ul>' if len(parts) > 1 else ""
    columns = (*parts, "total") if len(parts) > 1 else parts
    table_rows = [
        (name, bar.label, *map(short, bar.values), *([bar.text] if len(parts) > 1 else []))
        for name, rows in panels
        for bar in rows
    ]
    data = _data_table(("", "", *columns), table_rows)
    caption = f'{escape(title)} <span class="unit">{escape(x_label)}</span>'
    return _figure(caption, legend, f'<div class="panels">{"".join(shown)}</div>', note, data, raw=True)


def _range(
    ordered: list[float], reference: tuple[str, float] | None, from_zero: bool, cut: float
) -> tuple[float, float]:
    """The ends of the y axis, at round numbers."""
    low, high = ordered[0], ordered[-1]
    most = ordered[int(0.85 * (len(ordered) - 1))]
    if most > low and high - low > cut * (most - low):
        high = low + max(2.0, cut / 3) * (most - low)
    if reference:
        low, high = min(low, reference[1]), max(high, reference[1])
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def _axes(left: float, right: float, low: float, high: float) -> Iterable[str]:
    marks = ticks(low, high)
    for value, text in zip(marks, labels(marks), strict=True):
        y = _percent((high - value) / (high - low))
        yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick y" x="0" dx="-8" y="{y}" dy="4" text-anchor="end">{text}</text>'
    marks = ticks(left, right)
    for value, text in zip(marks, labels(marks), strict=True):
        x = _percent((value - left) / (right - left))
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="100%" y2="100%" transform="translate(0 4)"/>'
        yield f'<text class="tick x" x="{x}" y="100%" dy="18" text-anchor="middle">{text}</text>'
    yield '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'


def _axis_labels(x_label: str, y_label: str) -> list[str]:
    return [
        f'<text class="name" x="100%" y="100%" dy="36" text-anchor="end">{escape(x_label)}</text>',
        f'<text class="name" x="0" dx="-48" y="0" dy="-14">{escape(y_label)}</text>',
    ]


def _reference(name: str, share: float) -> list[str]:
    y, dy = _percent(share), 14 if share < 0.1 else -6
    return [
        f'<line class="reference" x1="0" x2="100%" y1="{y}" y2="{y}"/>',
        f'<text class="reference" x="100%" dx="-4" y="{y}" dy="{dy}" text-anchor="end">{escape(name)}</text>',
    ]


def _path(curve: Curve, places: list[tuple[float, float]]) -> str:
    # browsers do not dash extremely long curves, so values beyond a cut axis are clipped
    d = "M" + "L".join(f"{_coordinate(1000 * x)},{_coordinate(1000 * max(y, -0.1))}" for x, y in places)
    dash = DASHES[curve.tone % TONES] if curve.weight != "faint" else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path class="{curve.weight}" data-name="{escape(curve.name)}" stroke="{_tone(curve.tone)}"{dashed} d="{d}" '
        'vector-effect="non-scaling-stroke"/>'
    )


def _mark(tone: int, x: float, y: float) -> str:
    shape = MARKS[tone % len(MARKS)]
    if shape == "circle":
        return f'<circle class="mark" cx="{_percent(x)}" cy="{_percent(y)}" r="3.5" fill="{_tone(tone)}"/>'
    # an inner SVG allows a position in per cent for a shape of fixed size
    inner = f'<path class="mark" d="{SHAPES[shape]}" fill="{_tone(tone)}"/>'
    return f'<svg x="{_percent(x)}" y="{_percent(y)}" overflow="visible" width="1" height="1">{inner}</svg>'


def _legend_sample(curve: Curve) -> str:
    """A piece of the curve for the legend."""
    dash = f' stroke-dasharray="{DASHES[curve.tone % TONES]}"' if curve.weight != "faint" else ""
    mark = _mark(curve.tone, 0.5, 0.5) if curve.markers else ""
    stroke = f'<path class="{curve.weight}" stroke="{_tone(curve.tone)}"{dash} d="M0 6H30"/>'
    return f'<svg class="key" width="30" height="12" aria-hidden="true">{stroke}{mark}</svg>'


def _bar(bar: Bar, row: int, top: float, parts: Sequence[str], colours: Sequence[int]) -> str:
    y, start, drawn = row * ROW, 0.0, []
    for name, value, colour in zip(parts, bar.values, colours, strict=True):
        if value > 0:
            place = f'x="{_percent(start / top)}" width="{_percent(value / top)}" y="{y + 3}" height="{ROW - 6}"'
            title = f"<title>{escape(f'{bar.label}, {name}: {short(value)}')}</title>"
            drawn.append(f'<rect {place} fill="var(--part-{colour})">{title}</rect>')
            start += value
    middle = y + ROW / 2 + 4
    drawn.append(f'<text class="tick" x="0" dx="-8" y="{middle:g}" text-anchor="end">{escape(bar.label)}</text>')
    drawn.append(f'<text class="value" x="{_percent(start / top)}" dx="6" y="{middle:g}">{escape(bar.text)}</text>')
    return "".join(drawn)


def _curve_description(curve: Curve) -> str:
    (_, first), (_, last) = curve.points[0], curve.points[-1]
    return f"{curve.name}: {short(first)}" + (f" at the start, {short(last)} at the end" * (len(curve.points) > 1))


def _svg(title: str, description: str, drawn: str, attributes: str) -> str:
    name = f"chart-{zlib.crc32((title + description).encode()):08x}"  # equal runs give equal bytes
    texts = f'<title id="{name}">{escape(title)}</title><desc id="{name}-about">{escape(description)}</desc>'
    return f'<svg role="img" aria-labelledby="{name}" aria-describedby="{name}-about" {attributes}>{texts}{drawn}</svg>'


def _figure(title: str, legend: str, picture: str, note: str, data: str, *, raw: bool = False) -> str:
    caption = title if raw else escape(title)
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="chart"><figcaption>{caption}</figcaption>{legend}{picture}{note}{data}</figure>'


def _curve_table(curves: Sequence[Curve], x_label: str, y_label: str) -> str:
    """The curves as a table; of long curves, every n-th point and the last."""
    each = max(8, TABLE_ROWS // len(curves))
    rows = []
    for curve in curves:
        step = max(1, math.ceil((len(curve.points) - 1) / each))
        kept = [*curve.points[:-1:step], curve.points[-1]]
        rows += [(curve.name, format_number(x), format_number(y)) for x, y in kept]
    return _data_table(("", x_label, y_label), rows)


def _data_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details class="data"><summary>Data</summary><div class="scroll">{table}</div></details>'


def _tone(index: int) -> str:
    return f"var(--tone-{index % TONES})"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

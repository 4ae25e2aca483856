"""Charts of the report as inline SVG: lines over an axis, and stacked bars a rank.

A chart has to be read on a phone, on a wide screen and on paper, without a script. So its SVG is as wide as the page
lets it be: what is placed is placed in per cent, curves lie in a stretched inner picture whose strokes keep their
width, and text keeps its size. Colours are those of `report.css`, by number (`--tone-0` …, `--part-0` …); curves of
different groups differ in dashes and marks as well, for grey prints and colour-blind eyes.

Every chart can be read as text too: a title, a description of a sentence, and a folded table of its data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from weft.text import format_number

TONES = 8  # colours of groups, over and over
ROW, AXIS = 24, 22  # height of a bar with its gap, and of the axis below
ROWS = 120  # of a folded table, at most, about

DASHES = ("", "8 3", "3 2", "10 3 2 3", "5 5", "14 3", "2 5", "10 3 2 3 2 3")
MARKS = ("circle", "square", "diamond", "triangle")
SHAPES = {"square": "M-3.5-3.5h7v7h-7z", "diamond": "M0-5L5 0L0 5L-5 0z", "triangle": "M0-5L5 4H-5z"}
_SCALES = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from where, by what, sign


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve. `weight`: "main", "thin" (one of several), "faint" (before smoothing); `marked`: each point is shown."""

    name: str
    points: Sequence[tuple[float, float]]
    tone: int
    weight: str = "main"
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The parts of one rank, in the order of the chart's parts, and what is written behind them."""

    label: str
    values: Sequence[float]
    text: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two, `about` + 1 of them at the most."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Texts of an axis's ticks, all of one scale: `0 20k 40k`."""
    most = max(map(abs, values))
    _, scale, sign = next((one for one in _SCALES if most >= one[0]), (0, 1.0, ""))
    return [short(value / scale) + (sign if value else "") for value in values]


def short(value: float) -> str:
    """A number as short as it can be read: `3e-4`, `0.0125`, `1.482`."""
    text = f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−") if value else "0"


def lines(
    title: str,
    curves: Sequence[Line],
    *,
    across: str,
    upward: str,
    zero: bool = False,
    cut: float = 12.0,
    reference: tuple[str, float] | None = None,
    note: str = "",
) -> str:
    """A chart of curves; `across` and `upward` name the axes with their units. No points at all: no chart.

    The axis is cut, and says so, where all values take more than `cut` times the range of nearly all: a run that went
    astray must not press the others flat.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    right = max(x for curve in curves for x, _ in curve.points) or 1.0
    left = min(0.0, min(x for curve in curves for x, _ in curve.points))
    values = sorted(y for curve in curves for _, y in curve.points)
    low, high = _range(values, reference, zero, cut)
    beyond = values[-1] > high * (1 + 1e-9)
    if beyond:
        note = f"{note} The axis is cut: values go up to {short(values[-1])}.".strip()

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left), (high - y) / (high - low)

    drawn = [*_axes(left, right, low, high), *_names(across, upward)]
    if reference:
        drawn += _reference(reference[0], place(left, reference[1])[1])
    paths = (_path(curve, [place(*point) for point in curve.points]) for curve in curves)
    spill = "hidden" if beyond else "visible"
    drawn.append(f'<svg width="100%" height="100%" {_STRETCH} overflow="{spill}">{"".join(paths)}</svg>')
    for curve in curves:
        if curve.marked or len(curve.points) == 1:
            drawn += [_mark(curve.tone, *place(x, y)) for x, y in curve.points if y <= high]
    told = f"{upward} against {across}. " + ". ".join(map(_told, [one for one in curves if one.weight == "main"]))
    box = f'data-x="{left:.9g} {right:.9g}" data-y="{low:.9g} {high:.9g}" data-across="{escape(across)}"'
    picture = f'<div class="plot">{_svg(title, told, "".join(drawn), f"class=curves {box}")}</div>'
    keys = "".join(f"<li>{_key(curve)}{escape(curve.name)}</li>" for curve in curves if curve.weight != "thin")
    legend = f'<ul class="legend">{keys}</ul>' if len(curves) > 1 else ""
    return _figure(title, legend, picture, note, _points(curves, across, upward))


def bars(
    title: str,
    panels: Sequence[tuple[str, Sequence[Bar]]],
    *,
    parts: Sequence[str],
    along: str,
    write: Callable[[float], str] = short,
    note: str = "",
) -> str:
    """Stacked bars, a panel for each group, all panels of one scale; `along` names the axis with its unit."""
    panels = [(name, rows) for name, rows in panels if rows]
    if not panels:
        return ""
    top = max(sum(bar.values) for _, rows in panels for bar in rows) or 1.0
    marks = ticks(0, top, 4)
    shown = []
    for name, rows in panels:
        drawn = [
            f'<line class="grid" x1="{_p(at / top)}" x2="{_p(at / top)}" y1="0" y2="{len(rows) * ROW}"/>'
            f'<text class="tick" x="{_p(at / top)}" y="{len(rows) * ROW + 16}" text-anchor="middle">{text}</text>'
            for at, text in zip(marks, labels(marks), strict=True)
        ]
        drawn += [_bar(bar, at, top, parts, write) for at, bar in enumerate(rows)]
        told = f"{along}. " + ". ".join(f"{bar.label}: {bar.text}" for bar in rows)
        picture = _svg(
            f"{title}, {name}" if name else title, told, "".join(drawn), f'style="height:{len(rows) * ROW + AXIS}px"'
        )
        head = f"<h4>{escape(name)}</h4>" if name else ""
        shown.append(f'<div class="panel">{head}<div class="bars">{picture}</div></div>')
    keys = [f'<li><i style="background:var(--part-{at})"></i>{escape(part)}</li>' for at, part in enumerate(parts)]
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if len(parts) > 1 else ""
    columns = (*parts, "total") if len(parts) > 1 else parts
    rows_of = [
        (name, bar.label, *map(write, bar.values), *([bar.text] if len(parts) > 1 else []))
        for name, rows in panels
        for bar in rows
    ]
    data = _data(("", "", *columns), rows_of)
    caption = f'{escape(title)} <span class="unit">{escape(along)}</span>'
    return _figure(caption, legend, f'<div class="panels">{"".join(shown)}</div>', note, data, raw=True)


_STRETCH = 'viewBox="0 0 1000 1000" preserveAspectRatio="none"'


def _range(ordered: list[float], reference: tuple[str, float] | None, zero: bool, cut: float) -> tuple[float, float]:
    """The ends of an axis, on round numbers."""
    low, high = ordered[0], ordered[-1]
    most = ordered[int(0.85 * (len(ordered) - 1))]
    if most > low and high - low > cut * (most - low):
        high = low + max(2.0, cut / 3) * (most - low)
    if reference:
        low, high = min(low, reference[1]), max(high, reference[1])
    if zero:
        low = min(0.0, low)
    if high <= low:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)


def _axes(left: float, right: float, low: float, high: float) -> Iterable[str]:
    marks = ticks(low, high)
    for at, text in zip(marks, labels(marks), strict=True):
        y = _p((high - at) / (high - low))
        yield f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick y" x="0" dx="-8" y="{y}" dy="4" text-anchor="end">{text}</text>'
    marks = ticks(left, right)
    for at, text in zip(marks, labels(marks), strict=True):
        x = _p((at - left) / (right - left))
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="100%" y2="100%" transform="translate(0 4)"/>'
        yield f'<text class="tick x" x="{x}" y="100%" dy="18" text-anchor="middle">{text}</text>'
    yield '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'


def _names(across: str, upward: str) -> list[str]:
    return [
        f'<text class="name" x="100%" y="100%" dy="36" text-anchor="end">{escape(across)}</text>',
        f'<text class="name" x="0" dx="-48" y="0" dy="-14">{escape(upward)}</text>',
    ]


def _reference(name: str, share: float) -> list[str]:
    y, dy = _p(share), 14 if share < 0.1 else -6
    return [
        f'<line class="reference" x1="0" x2="100%" y1="{y}" y2="{y}"/>',
        f'<text class="reference" x="100%" dx="-4" y="{y}" dy="{dy}" text-anchor="end">{escape(name)}</text>',
    ]


def _path(curve: Line, places: list[tuple[float, float]]) -> str:
    # what lies far beyond an axis that is cut would be miles long, and browsers dash no such curve
    d = "M" + "L".join(f"{_n(1000 * x)},{_n(1000 * max(y, -0.1))}" for x, y in places)
    dash = DASHES[curve.tone % TONES] if curve.weight != "faint" else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path class="{curve.weight}" data-name="{escape(curve.name)}" stroke="{_tone(curve.tone)}"{dashed} d="{d}" '
        'vector-effect="non-scaling-stroke"/>'
    )


def _mark(tone: int, x: float, y: float) -> str:
    shape = MARKS[tone % len(MARKS)]
    if shape == "circle":
        return f'<circle class="mark" cx="{_p(x)}" cy="{_p(y)}" r="3.5" fill="{_tone(tone)}"/>'
    # a shape that keeps its size at a place in per cent is an inner picture without one
    inner = f'<path class="mark" d="{SHAPES[shape]}" fill="{_tone(tone)}"/>'
    return f'<svg x="{_p(x)}" y="{_p(y)}" overflow="visible" width="1" height="1">{inner}</svg>'


def _key(curve: Line) -> str:
    """A piece of the curve, for the legend."""
    dash = f' stroke-dasharray="{DASHES[curve.tone % TONES]}"' if curve.weight != "faint" else ""
    mark = _mark(curve.tone, 0.5, 0.5) if curve.marked else ""
    stroke = f'<path class="{curve.weight}" stroke="{_tone(curve.tone)}"{dash} d="M0 6H30"/>'
    return f'<svg class="key" width="30" height="12" aria-hidden="true">{stroke}{mark}</svg>'


def _bar(bar: Bar, at: int, top: float, parts: Sequence[str], write: Callable[[float], str]) -> str:
    y, start, drawn = at * ROW, 0.0, []
    for part, (name, value) in enumerate(zip(parts, bar.values, strict=True)):
        if value > 0:
            place = f'x="{_p(start / top)}" width="{_p(value / top)}" y="{y + 3}" height="{ROW - 6}"'
            told = f"<title>{escape(f'{bar.label}, {name}: {write(value)}')}</title>"
            drawn.append(f'<rect {place} fill="var(--part-{part})">{told}</rect>')
            start += value
    middle = y + ROW / 2 + 4
    drawn.append(f'<text class="tick" x="0" dx="-8" y="{middle:g}" text-anchor="end">{escape(bar.label)}</text>')
    drawn.append(f'<text class="value" x="{_p(start / top)}" dx="6" y="{middle:g}">{escape(bar.text)}</text>')
    return "".join(drawn)


def _told(curve: Line) -> str:
    (_, first), (_, last) = curve.points[0], curve.points[-1]
    return f"{curve.name}: {short(first)}" + (f" at the start, {short(last)} at the end" * (len(curve.points) > 1))


def _svg(title: str, told: str, drawn: str, attributes: str) -> str:
    name = f"chart-{zlib.crc32((title + told).encode()):08x}"  # equal runs give equal bytes
    told = f'<title id="{name}">{escape(title)}</title><desc id="{name}-about">{escape(told)}</desc>'
    return f'<svg role="img" aria-labelledby="{name}" aria-describedby="{name}-about" {attributes}>{told}{drawn}</svg>'


def _figure(title: str, legend: str, picture: str, note: str, data: str, *, raw: bool = False) -> str:
    caption = title if raw else escape(title)
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="chart"><figcaption>{caption}</figcaption>{legend}{picture}{said}{data}</figure>'


def _points(curves: Sequence[Line], across: str, upward: str) -> str:
    """The curves as a table; of long ones every so many points, and the last."""
    each = max(8, ROWS // len(curves))
    rows = []
    for curve in curves:
        step = max(1, math.ceil((len(curve.points) - 1) / each))
        kept = [*curve.points[:-1:step], curve.points[-1]]
        rows += [(curve.name, format_number(x), format_number(y)) for x, y in kept]
    return _data(("", across, upward), rows)


def _data(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details class="data"><summary>Data</summary><div class="scroll">{table}</div></details>'


def _tone(at: int) -> str:
    return f"var(--tone-{at % TONES})"


def _p(share: float) -> str:
    return f"{100 * share:.2f}%"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

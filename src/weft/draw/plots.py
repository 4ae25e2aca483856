"""Plots of the benchmarks' pages as SVG files that stand alone: bars, bars made of parts, and curves, in panels.

Every number is written behind its bar, so that a picture can be read without its table. Panels of bars have one
scale, and a name keeps its colour in all panels. Equal numbers give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.draw import curves, rows
from weft.draw.report.charts import TONES, short
from weft.draw.rows import Part, Row
from weft.draw.sheet import PARTS, Sheet, order, sample, swatch
from weft.draw.values import Value, checked, filled, writer
from weft.errors import WeftError

__all__ = ["Value", "bars", "lines", "stacks"]


def bars(title: str, panels: Mapping[str, Mapping[str, Value]], *, unit: str, reference: float | None = None) -> str:
    """Horizontal bars, with whiskers for (low, middle, high); `reference`: the value of a dashed line.

    Up to eight names have a colour each; more have one colour together, for none could be told from its likeness.
    """
    filled(title, panels)
    if reference is not None:
        checked(f"{title}, reference", reference)
    values = {
        panel: {label: checked(f"{panel}, {label}", value) for label, value in some.items()}
        for panel, some in panels.items()
    }
    tones = order(panels.values())
    written = writer([middle for some in values.values() for _, middle, _ in some.values()], reference)

    def row(label: str, value: Value, low: float, middle: float, high: float) -> Row:
        tone = tones[label] if len(tones) <= TONES else 0
        whiskers = (low, high) if isinstance(value, Sequence) else None
        told = f"{label}: {short(middle)}" + (f" ({short(low)} to {short(high)})" if whiskers else "")
        part = Part(kind=f"b{tone}", value=middle, told=told)
        return Row(label=label, parts=[part], text=written(middle), whiskers=whiskers)

    sheet = Sheet(title, unit)
    drawn = {
        panel: [row(label, panels[panel][label], *three) for label, three in some.items()]
        for panel, some in values.items()
    }
    rows.draw(sheet, drawn, reference)
    return sheet.text()


def stacks(title: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, unit: str) -> str:
    """Horizontal bars made of parts, with their sum behind them and a legend of the parts."""
    filled(title, panels)
    for panel, some in panels.items():
        filled(f"{title}, {panel}", some)
        for label, made in some.items():
            for part, value in made.items():
                if checked(f"{panel}, {label}, {part}", value)[0] < 0:
                    raise WeftError(f"a part of a bar is 0 or more ({panel}, {label}, {part}: {value}); use bars")
    parts = order(made for some in panels.values() for made in some.values())
    if len(parts) > 2 * PARTS:
        raise WeftError(
            f"bars are made of at most {2 * PARTS} kinds of parts ({title}: {len(parts)}); put the smallest together"
        )
    written = writer([math.fsum(made.values()) for some in panels.values() for made in some.values()])

    def row(label: str, made: Mapping[str, float]) -> Row:
        pieces = [
            Part(
                kind=f"p{parts[name] % PARTS} part",
                value=made[name],
                told=f"{label}, {name}: {short(made[name])}",
                hatched=parts[name] >= PARTS,
            )
            for name in parts
            if name in made
        ]
        return Row(label=label, parts=pieces, text=written(math.fsum(made.values())))

    sheet = Sheet(title, unit)
    sheet.legend([(swatch(at), part) for part, at in parts.items()])
    rows.draw(sheet, {panel: [row(*one) for one in some.items()] for panel, some in panels.items()})
    return sheet.text()


def lines(
    title: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Value]]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Curves, with a band for (low, middle, high), and a legend. Short ones show each of their points.

    All panels have one scale, unless one of them would be pressed flat by it; then each has its own.
    """
    filled(title, panels)
    for panel, some in panels.items():
        filled(f"{title}, {panel}", some)
        for name, points in some.items():
            for across, _ in points:
                checked(f"{panel}, {name}, {x}", across, positive=log_x)
    values = {
        panel: {
            name: [(across, checked(f"{panel}, {name}, {y}", value, positive=log_y)) for across, value in points]
            for name, points in some.items()
        }
        for panel, some in panels.items()
    }
    tones = order(panels.values())
    marked = {name for some in values.values() for name, points in some.items() if len(points) <= curves.FEW}
    sheet = Sheet(title)
    sheet.legend([(sample(tone, marked=name in marked), name) for name, tone in tones.items()])
    curves.draw(sheet, values, tones, names=(x, y), log=(log_x, log_y))
    return sheet.text()

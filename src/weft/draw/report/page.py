"""The report of one run or of several: a page that stands alone, opens offline, and can be shown to a colleague.

It begins with the result in figures and words, then shows the charts that the words are taken from, and ends with what
is needed to repeat it. All of it is in the page without a script; `report.js` only adds values under the pointer.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from weft.draw.html_page import page
from weft.draw.report.charts import Bar, Line, bars, lines
from weft.draw.report.summary_text import (
    SAMPLES,
    SECONDS,
    VALUE,
    Course,
    Run,
    by_group,
    course,
    headline,
    mean,
    plain,
    reading,
    smoothed,
    thinned,
    total,
    width,
)
from weft.errors import WeftError
from weft.simulate import CATEGORIES
from weft.text import format_bytes

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def report(
    runs: Sequence[Run],
    *,
    title: str,
    metric: str,
    reference: tuple[str, float] | None = None,
    table: Table | None = None,
) -> str:
    """A self-contained page.

    `metric` is the key of the evaluations that runs are judged by, such as "loss" or "accuracy"; `reference` a named
    loss to compare with, drawn as a line; `table` head and rows of a comparison: a cell that ends with `*` is marked as
    the best of its column.
    """
    _check(runs)
    parts = [
        f"<header><h1>{escape(title)}</h1></header>",
        _figures(runs[0].figures if len(runs) == 1 else headline(runs, metric)),
        f'<p id="reading">{escape(reading(runs, metric, reference))}</p>',
        _table(table) if table else "",
        _section("Training", _curves(runs, metric, reference)),
        _section("Ranks", [_memory(runs), _bubbles(runs)]),
        _section("Timelines" if len(runs) > 1 else "Timeline", _timelines(runs), "strips"),
        _section("Generated text", _samples(runs), "folded"),
        _section("Configuration", _configurations(runs), "folded"),
    ]
    return page(title=title, style="report/report.css", script="report/report.js", main="\n".join(filter(None, parts)))


def _check(runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise WeftError(f"a report needs one run or more, each of another name (runs: {', '.join(names) or 'none'})")


def _section(title: str, parts: Sequence[str], kind: str = "charts") -> str:
    shown = "\n".join(filter(None, parts))
    return f'<section><h2>{title}</h2><div class="{kind}">{shown}</div></section>' if shown else ""


def _figures(figures: Mapping[str, str]) -> str:
    cards = [f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in figures.items()]
    return f'<dl class="figures">{"".join(cards)}</dl>' if cards else ""


def _table(table: Table) -> str:
    head, rows = table
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    marked = any(cell.endswith("*") for row in rows for cell in row)
    note = '<p class="note"><b>Bold</b> with a dot: best of its column.</p>' if marked else ""
    whole = f'<table id="compare"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<section><h2>Comparison</h2><div class="scroll card">{whole}</div>{note}</section>'


def _cell(text: str) -> str:
    if text.endswith("*"):
        return f'<td class="best">{escape(text[:-1].rstrip())}</td>'
    return f"<td>{escape(text)}</td>"


def _curves(runs: Sequence[Run], metric: str, reference: tuple[str, float] | None) -> list[str]:
    """Loss and metric over samples and over time, then learning rate and throughput."""
    single, note, charts = len(runs) == 1, _note(runs), []
    named, axes = "Loss" if single else "Training loss", (_Axis("samples", SAMPLES, 1.0), _clock(runs))
    for axis in axes:
        curves, about = _smooth(runs, "loss", axis)
        if single:
            held = _points(course(runs[0].evaluations, "loss"), axis)
            curves.append(Line(name="validation", points=held, tone=1, marked=True))
        over, cut = f"{named} {axis.over}", 12.0 if single else 3.0  # several runs differ most at the end
        charts.append(lines(over, curves, across=axis.name, upward="loss", cut=cut, reference=reference, note=about))
    percent, line = metric == "accuracy", reference if metric == "loss" else None
    upward = f"{metric} (%)" if percent else metric
    for axis in axes if metric != "loss" or not single else ():
        curves = _grouped(runs, lambda run: course(run.evaluations, metric), axis, percent=percent, marked=True)
        over = f"Validation {metric} {axis.over}"
        charts.append(lines(over, curves, across=axis.name, upward=upward, reference=line, note=note))
    samples, time = axes
    rates = _grouped(runs, lambda run: course(run.training, "lr"), samples)
    if len(rates) > 1 and len({tuple(curve.points) for curve in rates}) == 1:
        rates, note = [Line(name="all runs", points=rates[0].points, tone=0)], "The same in all runs."
    charts.append(lines("Learning rate", rates, across=samples.name, upward="learning rate", zero=True, note=note))
    curves, about = _smooth(runs, "samples_per_second", time)
    charts.append(lines("Throughput", curves, across=time.name, upward="samples/s", zero=True, note=about))
    return charts


class _Axis(NamedTuple):
    name: str
    column: int
    unit: float  # of the name, in those of the column

    @property
    def over(self) -> str:
        return f"over {self.name.split(' ')[0]}"


def _clock(runs: Sequence[Run]) -> _Axis:
    most = max(course(run.training, "seconds")[:, VALUE].max(initial=0) for run in runs)
    name, unit = ("s", 1.0) if most < 180 else ("min", 60.0) if most < 3 * 3600 else ("h", 3600.0)
    return _Axis(f"time ({name})", SECONDS, unit)


def _note(runs: Sequence[Run]) -> str:
    return "Thin: single runs; thick: their mean." if len(runs) > len(by_group(runs)) else ""


def _points(rows: Course, axis: _Axis, *, percent: bool = False) -> list[tuple[float, float]]:
    kept, scale = thinned(rows), 100.0 if percent else 1.0
    return list(zip((kept[:, axis.column] / axis.unit).tolist(), (kept[:, VALUE] * scale).tolist(), strict=True))


def _smooth(runs: Sequence[Run], key: str, axis: _Axis) -> tuple[list[Line], str]:
    """Of the training lines: several runs smoothed; one as it was, and smoothed if it is long enough."""
    if len(runs) > 1:
        curves = _grouped(runs, lambda run: smoothed(course(run.training, key)), axis)
        return curves, f"Smoothed: each value the mean of about a thirtieth of the run. {_note(runs)}".strip()
    rows = course(runs[0].training, key)
    each, around = len(rows) / max(1, len(thinned(rows))), 2 * width(rows) + 1
    name = "training" if each == 1 else f"training, means of about {each:.0f} lines"
    if around == 1:
        return [Line(name=name, points=_points(rows, axis), tone=0)], ""
    curves = [
        Line(name=name, points=_points(rows, axis), tone=0, weight="faint"),
        Line(name="training, smoothed", points=_points(smoothed(rows), axis), tone=0),
    ]
    return curves, f"Smoothed: each value the mean of {around:,} lines around it."


def _grouped(
    runs: Sequence[Run], rows: Callable[[Run], Course], axis: _Axis, *, percent: bool = False, marked: bool = False
) -> list[Line]:
    """A thick curve for each group; where that is a mean, thin ones for its runs below."""
    thin, thick = [], []
    for tone, (name, members) in enumerate(by_group(runs).items()):
        known = [(run.name, one) for run in members if len(one := rows(run))]
        if len(known) > 1:
            for each, one in known:
                thin.append(Line(name=each, points=_points(one, axis, percent=percent), tone=tone, weight="thin"))
            name += f", mean of {len(known)}"
        if known:
            points = _points(mean([one for _, one in known]), axis, percent=percent)
            thick.append(Line(name=name, points=points, tone=tone, marked=marked))
    return [*thin, *thick]


def _memory(runs: Sequence[Run]) -> str:
    groups = {name: [run for run in members if run.memory] for name, members in by_group(runs).items()}
    held = {name: _largest(members) for name, members in groups.items() if members}
    ranks = [one for group in held.values() for one in group]
    most = max(map(total, ranks), default=0)
    unit, name = next((one for one in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if most >= one[0]), (1, "B"))
    parts = [part for part in (*CATEGORIES, "other") if any(_share(one, part) > 0.001 * most for one in ranks)]
    panels = []
    for group, members in held.items():
        rows = [
            Bar(
                label=f"rank {rank}", values=[_share(one, part) / unit for part in parts], text=format_bytes(total(one))
            )
            for rank, one in enumerate(members)
        ]
        panels.append((group if len(held) > 1 else "", rows))
    note = "Of the runs of a group, the largest peak of each rank." if _note(runs) else ""
    return bars("Peak memory of each rank", panels, parts=[*map(plain, parts)], along=name, note=note)


def _share(memory: Mapping[str, int], part: str) -> float:
    if part == "other":
        return max(0.0, total(memory) - sum(memory.get(known, 0) for known in CATEGORIES))
    return memory.get(part, 0)


def _largest(runs: Sequence[Run]) -> list[Mapping[str, int]]:
    ranks = range(max(len(run.memory) for run in runs))
    return [max((run.memory[rank] for run in runs if rank < len(run.memory)), key=total) for rank in ranks]


def _bubbles(runs: Sequence[Run]) -> str:
    panels = []
    groups = {name: [run.bubbles for run in members if run.bubbles] for name, members in by_group(runs).items()}
    for group, known in groups.items():
        means = [sum(ranks) / len(ranks) for ranks in zip(*known, strict=False)]
        rows = [Bar(label=f"rank {at}", values=[100 * one], text=f"{one:.1%}") for at, one in enumerate(means)]
        panels.append((group if len(groups) > 1 else "", rows))
    note = "The mean of the runs of a group." if _note(runs) else ""
    return bars("Bubble of each rank", panels, parts=["bubble (%)"], along="% of its time waiting", note=note)


def _timelines(runs: Sequence[Run]) -> list[str]:
    shown: dict[str, list[str]] = {}
    for run in runs:
        if run.timeline:
            shown.setdefault(run.timeline, []).append(run.name)
    note = '<p class="note">Each picture has a time axis of its own.</p>' if len(shown) > 1 else ""
    strips = [
        f'<figure class="strip"><figcaption>{escape("; ".join(names))}</figcaption><div class="scroll">'
        f'<img alt="Timeline of {escape("; ".join(names))}" '
        f'src="data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"></div></figure>'
        for picture, names in shown.items()
    ]
    return [*strips, note]


def _samples(runs: Sequence[Run]) -> list[str]:
    return [_folded(run.name, run.sample, shown=len(runs) == 1) for run in runs if run.sample]


def _configurations(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        figures = _figures(run.figures) if len(runs) > 1 else ""
        if figures or run.configuration:
            found.append(_folded(run.name, run.configuration, before=figures))
    return found


def _folded(name: str, text: str, *, before: str = "", shown: bool = False) -> str:
    pre = f'<pre tabindex="0">{escape(text)}</pre>' if text else ""
    return f"<details{' open' * shown}><summary>{escape(name)}</summary>{before}{pre}</details>"

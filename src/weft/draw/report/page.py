"""The report of one run or of several: a self-contained HTML page that works offline.

It starts with the result as figures and sentences, then shows the charts behind them, and ends with the configuration
that reproduces the runs. Everything is in the page without a script; `report.js` only adds values under the pointer.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from weft.draw.html_page import page
from weft.draw.report.charts import Bar, Curve, bar_chart, line_chart
from weft.draw.report.runs import (
    SAMPLES,
    SECONDS,
    VALUE,
    Run,
    Series,
    by_group,
    mean_series,
    series,
    smoothed,
    smoothing_radius,
    thinned,
    total_bytes,
)
from weft.draw.report.summary_text import category_name, key_figures, summary
from weft.errors import WeftError
from weft.metrics import RESIDENT_PARTS, SHARED_PROCESS
from weft.simulate import CATEGORIES
from weft.text import byte_unit, format_bytes

PARTS = (*CATEGORIES, "other")  # of memory; each has its own colour
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

    `metric` is the key of the evaluations that runs are judged by, such as "loss" or "accuracy". `reference` is the
    name and value of a loss to compare with, drawn as a line. `table` is the head and the rows of a comparison; a cell
    that ends with `*` is marked as the best of its column.
    """
    _check(runs)
    parts = [
        f"<header><h1>{escape(title)}</h1></header>",
        _figures(runs[0].figures if len(runs) == 1 else key_figures(runs, metric)),
        f'<p id="summary">{escape(summary(runs, metric, reference))}</p>',
        _table(table) if table else "",
        _section("Training", _training_charts(runs, metric, reference)),
        _section("Ranks", [_memory_chart(runs), _resident_chart(runs), _bubble_chart(runs)]),
        _section("Timelines" if len(runs) > 1 else "Timeline", _timelines(runs), "strips"),
        _section("Generated text", _samples(runs), "folded"),
        _section("Configuration", _configurations(runs), "folded"),
    ]
    return page(title=title, style="report/report.css", script="report/report.js", main="\n".join(filter(None, parts)))


def _check(runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise WeftError(
            f"a report needs at least one run, and a different name for each (runs: {', '.join(names) or 'none'}); "
            "rename the duplicates"
        )


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
    any_best = any(cell.endswith("*") for row in rows for cell in row)
    note = '<p class="note"><b>Bold</b> with a dot: best of its column.</p>' if any_best else ""
    whole = f'<table id="compare"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<section><h2>Comparison</h2><div class="scroll card">{whole}</div>{note}</section>'


def _cell(text: str) -> str:
    if text.endswith("*"):
        return f'<td class="best">{escape(text[:-1].rstrip())}</td>'
    return f"<td>{escape(text)}</td>"


class _Axis(NamedTuple):
    name: str
    column: int  # of a series
    unit: float  # divides the column

    @property
    def over(self) -> str:
        return f"over {self.name.split(' ')[0]}"


def _training_charts(runs: Sequence[Run], metric: str, reference: tuple[str, float] | None) -> list[str]:
    """Loss and metric over samples and over time, then learning rate and throughput."""
    samples, time = _Axis("samples", SAMPLES, 1.0), _time_axis(runs)
    return [
        *_loss_charts(runs, (samples, time), reference),
        *_metric_charts(runs, metric, (samples, time), reference),
        _learning_rate_chart(runs, samples),
        _throughput_chart(runs, time),
    ]


def _loss_charts(runs: Sequence[Run], axes: Sequence[_Axis], reference: tuple[str, float] | None) -> list[str]:
    single, charts = len(runs) == 1, []
    for axis in axes:
        curves, note = _training_curves(runs, "loss", axis)
        if single:
            points = _points(series(runs[0].evaluations, "loss"), axis)
            curves.append(Curve(name="validation", points=points, tone=1, markers=True))
        title = f"{'Loss' if single else 'Training loss'} {axis.over}"
        cut = 12.0 if single else 3.0  # several runs differ most at the end
        chart = line_chart(title, curves, x_label=axis.name, y_label="loss", cut=cut, reference=reference, note=note)
        charts.append(chart)
    return charts


def _metric_charts(
    runs: Sequence[Run], metric: str, axes: Sequence[_Axis], reference: tuple[str, float] | None
) -> list[str]:
    if metric == "loss" and len(runs) == 1:
        return []  # the loss charts show it
    percent, line = metric == "accuracy", reference if metric == "loss" else None
    charts = []
    for axis in axes:
        curves = _group_curves(runs, lambda run: series(run.evaluations, metric), axis, percent=percent, markers=True)
        title, y_label = f"Validation {metric} {axis.over}", f"{metric} (%)" if percent else metric
        chart = line_chart(title, curves, x_label=axis.name, y_label=y_label, reference=line, note=_group_note(runs))
        charts.append(chart)
    return charts


def _learning_rate_chart(runs: Sequence[Run], axis: _Axis) -> str:
    curves, note = _group_curves(runs, lambda run: series(run.training, "lr"), axis), _group_note(runs)
    if len(curves) > 1 and len({tuple(curve.points) for curve in curves}) == 1:
        curves, note = [Curve(name="all runs", points=curves[0].points, tone=0)], "The same in all runs."
    return line_chart("Learning rate", curves, x_label=axis.name, y_label="learning rate", from_zero=True, note=note)


def _throughput_chart(runs: Sequence[Run], axis: _Axis) -> str:
    curves, note = _training_curves(runs, "samples_per_second", axis)
    return line_chart("Throughput", curves, x_label=axis.name, y_label="samples/s", from_zero=True, note=note)


def _time_axis(runs: Sequence[Run]) -> _Axis:
    longest = max(series(run.training, "seconds")[:, VALUE].max(initial=0) for run in runs)
    name, unit = ("s", 1.0) if longest < 180 else ("min", 60.0) if longest < 3 * 3600 else ("h", 3600.0)
    return _Axis(f"time ({name})", SECONDS, unit)


def _group_note(runs: Sequence[Run]) -> str:
    return "Thin: single runs; thick: their mean." if len(runs) > len(by_group(runs)) else ""


def _points(rows: Series, axis: _Axis, *, percent: bool = False) -> list[tuple[float, float]]:
    kept, scale = thinned(rows), 100.0 if percent else 1.0
    return list(zip((kept[:, axis.column] / axis.unit).tolist(), (kept[:, VALUE] * scale).tolist(), strict=True))


def _training_curves(runs: Sequence[Run], key: str, axis: _Axis) -> tuple[list[Curve], str]:
    """Curves of a training value, and a note on smoothing. A single run is shown unsmoothed too."""
    if len(runs) > 1:
        curves = _group_curves(runs, lambda run: smoothed(series(run.training, key)), axis)
        return curves, f"Smoothed: each value is the mean of about a thirtieth of the run. {_group_note(runs)}".strip()
    rows = series(runs[0].training, key)
    lines_per_point, window = len(rows) / max(1, len(thinned(rows))), 2 * smoothing_radius(rows) + 1
    name = "training" if lines_per_point == 1 else f"training, means of about {lines_per_point:.0f} lines"
    if window == 1:
        return [Curve(name=name, points=_points(rows, axis), tone=0)], ""
    curves = [
        Curve(name=name, points=_points(rows, axis), tone=0, weight="faint"),
        Curve(name="training, smoothed", points=_points(smoothed(rows), axis), tone=0),
    ]
    return curves, f"Smoothed: each value is the mean of the {window:,} lines around it."


def _group_curves(
    runs: Sequence[Run], rows_of: Callable[[Run], Series], axis: _Axis, *, percent: bool = False, markers: bool = False
) -> list[Curve]:
    """A thick curve per group, drawn over thin curves of its runs if it is their mean."""
    thin, thick = [], []
    for tone, (name, members) in enumerate(by_group(runs).items()):
        known = {run.name: rows for run in members if len(rows := rows_of(run))}
        if len(known) > 1:
            for run_name, rows in known.items():
                points = _points(rows, axis, percent=percent)
                thin.append(Curve(name=run_name, points=points, tone=tone, weight="thin"))
            name += f", mean of {len(known)}"
        if known:
            points = _points(mean_series([*known.values()]), axis, percent=percent)
            thick.append(Curve(name=name, points=points, tone=tone, markers=markers))
    return [*thin, *thick]


def _memory_chart(runs: Sequence[Run]) -> str:
    groups = {name: [run for run in members if run.memory] for name, members in by_group(runs).items()}
    peaks = {name: _largest_peaks(members) for name, members in groups.items() if members}
    every_rank = [memory for ranks in peaks.values() for memory in ranks]
    most = max(map(total_bytes, every_rank), default=0)
    scale, unit = byte_unit(most)
    parts = [part for part in PARTS if any(_part_bytes(memory, part) > 0.001 * most for memory in every_rank)]
    panels = []
    for group, ranks in peaks.items():
        rows = [
            Bar(
                label=f"rank {rank}",
                values=[_part_bytes(memory, part) / scale for part in parts],
                text=format_bytes(total_bytes(memory)),
            )
            for rank, memory in enumerate(ranks)
        ]
        panels.append((group if len(peaks) > 1 else "", rows))
    note = "The largest peak of each rank over the runs of a group." if _group_note(runs) else ""
    return bar_chart(
        "Peak memory of each rank",
        panels,
        parts=[*map(category_name, parts)],
        x_label=unit,
        colours=[*map(PARTS.index, parts)],
        note=note,
    )


def _resident_chart(runs: Sequence[Run]) -> str:
    """The peak of each process as the system counts it, of the largest run of each group."""
    known = {name: [run for run in members if run.resident] for name, members in by_group(runs).items()}
    largest = {name: max(members, key=_largest_resident) for name, members in known.items() if members}
    scale, unit = byte_unit(max(map(_largest_resident, largest.values()), default=0))
    panels = []
    for group, run in largest.items():
        rows = [
            Bar(
                label=name.removeprefix("ranks "),
                values=[max(0, figures[part]) / scale for part in RESIDENT_PARTS],
                text=format_bytes(figures["peak"]),
            )
            for name, figures in run.resident.items()
        ]
        panels.append((group if len(largest) > 1 else "", rows))
    notes = ["Of each group, the run with the largest."] if _group_note(runs) else []
    if any(figures["ranks"] > 1 for run in largest.values() for figures in run.resident.values()):
        notes.append(f"{SHARED_PROCESS.capitalize()}.")
    title, parts = "Resident set of each process at its peak", list(RESIDENT_PARTS.values())
    return bar_chart(title, panels, parts=parts, x_label=unit, note=" ".join(notes))


def _largest_resident(run: Run) -> int:
    return max(figures["peak"] for figures in run.resident.values())


def _part_bytes(memory: Mapping[str, int], part: str) -> float:
    if part == "other":
        return max(0.0, total_bytes(memory) - sum(memory.get(category, 0) for category in CATEGORIES))
    return memory.get(part, 0)


def _largest_peaks(runs: Sequence[Run]) -> list[Mapping[str, int]]:
    """For each rank, the memory of the run in which it held most."""
    ranks = range(max(len(run.memory) for run in runs))
    return [max((run.memory[rank] for run in runs if rank < len(run.memory)), key=total_bytes) for rank in ranks]


def _bubble_chart(runs: Sequence[Run]) -> str:
    panels = []
    groups = {name: [run.bubbles for run in members if run.bubbles] for name, members in by_group(runs).items()}
    for group, bubbles in groups.items():
        means = [sum(same_rank) / len(same_rank) for same_rank in zip(*bubbles, strict=False)]
        rows = [Bar(label=f"rank {rank}", values=[100 * mean], text=f"{mean:.1%}") for rank, mean in enumerate(means)]
        panels.append((group if len(groups) > 1 else "", rows))
    note = "The mean of the runs of a group." if _group_note(runs) else ""
    return bar_chart("Bubble of each rank", panels, parts=["bubble (%)"], x_label="% of its time waiting", note=note)


def _timelines(runs: Sequence[Run]) -> list[str]:
    pictures: dict[str, list[str]] = {}
    for run in runs:
        if run.timeline:
            pictures.setdefault(run.timeline, []).append(run.name)
    note = '<p class="note">Each picture has its own time axis.</p>' if len(pictures) > 1 else ""
    strips = [
        f'<figure class="strip"><figcaption>{escape("; ".join(names))}</figcaption><div class="scroll">'
        f'<img alt="Timeline of {escape("; ".join(names))}" '
        f'src="data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"></div></figure>'
        for picture, names in pictures.items()
    ]
    return [*strips, note]


def _samples(runs: Sequence[Run]) -> list[str]:
    return [_folded(run.name, run.sample, is_open=len(runs) == 1) for run in runs if run.sample]


def _configurations(runs: Sequence[Run]) -> list[str]:
    parts = []
    for run in runs:
        figures = _figures(run.figures) if len(runs) > 1 else ""
        if figures or run.configuration:
            parts.append(_folded(run.name, run.configuration, before=figures))
    return parts


def _folded(name: str, text: str, *, before: str = "", is_open: bool = False) -> str:
    pre = f'<pre tabindex="0">{escape(text)}</pre>' if text else ""
    return f"<details{' open' * is_open}><summary>{escape(name)}</summary>{before}{pre}</details>"

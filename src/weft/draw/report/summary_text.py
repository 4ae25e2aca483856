"""The result of one run or of several as sentences and key figures, from the same series that the charts show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.draw.report.charts import short
from weft.draw.report.runs import SAMPLES, VALUE, Run, Series, average, by_group, series, smoothed, total_bytes
from weft.metrics import higher_is_better
from weft.text import format_bytes, format_duration

_format_speed, _format_share = "{:.1f} samples/s".format, "{:.1%}".format


def summary(runs: Sequence[Run], metric: str, reference: tuple[str, float] | None) -> str:
    """What was trained, and the result, in a few sentences."""
    sentences = _single_run(runs[0], metric, reference) if len(runs) == 1 else _several_runs(runs, metric)
    finite = sum(len(series(run.training, "loss")) for run in runs)
    omitted = sum(len({line.get("update", index) for index, line in enumerate(run.training)}) for run in runs) - finite
    if omitted:
        sentences.append(f"{omitted:,} of {omitted + finite:,} training lines have no finite loss and are left out.")
    return " ".join(sentences)


def key_figures(runs: Sequence[Run], metric: str) -> dict[str, str]:
    """The best group of several runs, by each measure."""
    measures: list[tuple[str, Callable[[Run], float], bool, Callable[[float], str]]] = [
        (
            f"best final {metric}",
            lambda run: run.final(metric),
            higher_is_better(metric),
            lambda value: _format_metric(metric, value),
        ),
        ("fastest", lambda run: run.speed, True, _format_speed),
        ("smallest bubble", lambda run: run.bubble, False, _format_share),
        ("least memory, largest rank", lambda run: run.peak, False, format_bytes),
    ]
    figures = {}
    for label, value, higher, text in measures:
        ranking = _ranking(by_group(runs), value)
        if ranking:
            best, name = ranking[-1 if higher else 0]
            figures[label] = f"{name}: {text(best)}"
    return figures


def category_name(category: str) -> str:
    return category.replace("_", " ")


def _format_metric(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.3f}" if abs(value) < 100 else short(value)


def _single_run(run: Run, metric: str, reference: tuple[str, float] | None) -> list[str]:
    sentences = []
    losses, values = series(run.training, "loss"), series(run.evaluations, metric)
    if len(losses):
        update, samples, seconds, _ = losses[-1]
        sentences.append(
            f"{run.name}: {_count(update, 'update')}, {_count(samples, 'sample')}, in {format_duration(seconds)}."
        )
        first, last = smoothed(losses)[[0, -1], VALUE]
        sentences.append(_change(first, last) if len(losses) > 1 else f"The training loss was {last:.3f}.")
    if len(values):
        best = values[(np.argmax if higher_is_better(metric) else np.argmin)(values[:, VALUE])]
        last = values[-1]
        text = f"On validation data the {metric} was {_format_metric(metric, last[VALUE])} at the end"
        if best[VALUE] == last[VALUE]:
            sentences.append(text + (", the best of all evaluations." if len(values) > 1 else "."))
        else:
            value = _format_metric(metric, best[VALUE])
            sentences.append(f"{text}, and best after {best[SAMPLES]:,.0f} samples: {value}.")
    else:
        sentences.append("It was not evaluated on validation data.")
    return sentences + _against_reference(run, losses, reference) + _bubble(run) + _memory(run)


def _count(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun if number == 1 else noun + 's'}"


def _change(first: float, last: float) -> str:
    if abs(last - first) < 0.02 * abs(first):
        return f"The training loss stayed near {last:.3f}."
    return f"The training loss {'fell' if last < first else 'rose'} from {first:.3f} to {last:.3f}."


def _against_reference(run: Run, losses: Series, reference: tuple[str, float] | None) -> list[str]:
    values = series(run.evaluations, "loss")
    kind, rows = ("validation", values) if len(values) else ("training", smoothed(losses))
    if not reference or not len(rows):
        return []
    side = "below" if rows[-1, VALUE] < reference[1] else "above"
    return [f"At the end the {kind} loss is {side} the {reference[0]} ({reference[1]:.3f})."]


def _bubble(run: Run) -> list[str]:
    if not run.bubbles:
        return []
    rank = max(range(len(run.bubbles)), key=run.bubbles.__getitem__)
    largest = f", rank {rank} most, {run.bubbles[rank]:.1%}" if len(run.bubbles) > 1 else ""
    return [f"The ranks waited {run.bubble:.1%} of the time on average (the bubble){largest}."]


def _memory(run: Run) -> list[str]:
    if not run.memory:
        return []
    rank = max(range(len(run.memory)), key=lambda rank: total_bytes(run.memory[rank]))
    parts = {name: nbytes for name, nbytes in run.memory[rank].items() if name != "total"}
    largest = max(parts, key=parts.__getitem__, default="")
    share = f", {parts[largest] / run.peak:.0%} of it {category_name(largest)}" if run.peak and len(parts) > 1 else ""
    return [f"The largest rank, rank {rank}, held {format_bytes(run.peak)} at its peak{share}."]


def _several_runs(runs: Sequence[Run], metric: str) -> list[str]:
    groups = by_group(runs)
    fewest, most = min(map(len, groups.values())), max(map(len, groups.values()))
    each = f", {'up to ' if fewest < most else ''}{most} runs each" if most > 1 else ""
    sentences = [f"{len(runs)} runs: {', '.join(groups)}{each}."]
    ranking = _ranking(groups, lambda run: run.final(metric))
    if higher_is_better(metric):
        ranking.reverse()
    if len(ranking) > 1:
        (best, best_name), (worst, worst_name) = ranking[0], ranking[-1]
        sentences.append(
            f"At the end, {best_name} had the best {metric} on validation data, {_format_metric(metric, best)}, "
            f"and {worst_name} the worst, {_format_metric(metric, worst)}{' (means of the runs)' if most > 1 else ''}."
        )
        sentences.append(_significance(groups, metric, abs(worst - best), most))
    sentences += _extremes(
        groups, "{1} was the fastest, {3}, and {0} the slowest, {2}.", lambda run: run.speed, _format_speed
    )
    sentences += _extremes(
        groups, "{0} waited the least, {2} of the time, and {1} the most, {3}.", lambda run: run.bubble, _format_share
    )
    sentences += _extremes(
        groups, "{0} needed the least memory, {2} per rank, and {1} the most, {3}.", lambda run: run.peak, format_bytes
    )
    return sentences


def _ranking(groups: Mapping[str, Sequence[Run]], value: Callable[[Run], float]) -> list[tuple[float, str]]:
    """The mean value and the name of each group that has one, lowest first."""
    means = ((average(members, value), name) for name, members in groups.items())
    return sorted((mean, name) for mean, name in means if math.isfinite(mean))


def _extremes(
    groups: Mapping[str, Sequence[Run]], sentence: str, value: Callable[[Run], float], text: Callable[[float], str]
) -> list[str]:
    """A sentence about the lowest and the highest group, unless their texts are equal."""
    ranking = _ranking(groups, value)
    if not ranking or text(ranking[0][0]) == text(ranking[-1][0]):
        return []
    (lowest, lowest_name), (highest, highest_name) = ranking[0], ranking[-1]
    return [sentence.format(lowest_name, highest_name, text(lowest), text(highest))]


def _significance(groups: Mapping[str, Sequence[Run]], metric: str, difference: float, runs_each: int) -> str:
    """Whether the difference between the groups exceeds the spread within them."""
    if runs_each == 1:
        return "There is only one run of each, so small differences may be chance."
    finals = [
        [value for value in (run.final(metric) for run in members) if math.isfinite(value)]
        for members in groups.values()
    ]
    spread = max(max(values) - min(values) for values in finals if values)
    verdict = "less, which may be chance" if difference < spread else "more"
    spread_text = _format_metric(metric, spread)
    return f"Runs of a group differ by up to {spread_text}, the best and the worst group by {verdict}."

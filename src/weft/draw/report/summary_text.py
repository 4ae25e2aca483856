"""What runs say: their lines as courses of numbers, smoothed and thinned out, and the result in plain words.

The report draws these courses; the sentences are made of the same numbers, so that text and charts agree. A value that
is missing or not finite is left out, and the text says how many were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.draw.report.charts import short
from weft.metrics import higher_is_better
from weft.text import format_bytes, format_duration

POINTS = 400  # of a curve; more can't be seen

SPEED, SHARE = "{:,.0f} samples/s".format, "{:.1%}".format

UPDATE, SAMPLES, SECONDS, VALUE = range(4)
Course = NDArray[np.float64]  # a row for each line: update, samples, seconds, value


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a report shows of a run; whatever is empty is left out.

    training     lines with `update`, `samples`, `seconds`, `loss`, and where known `lr` and `samples_per_second`
    evaluations  lines with `update`, `samples`, `seconds`, `loss`, and `perplexity` or `accuracy` (0 to 1)
    memory       peak bytes of each rank by category, and "total"
    bubbles      the share of its time that each rank waited, 0 to 1
    timeline     an SVG, as of `weft.draw.svg`
    """

    name: str  # unique on the page, such as "wpipe, seed 0"
    group: str  # runs of one group, such as the seeds of a schedule, share a colour
    figures: Mapping[str, str]  # headline: label -> text
    training: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    memory: Sequence[Mapping[str, int]]
    bubbles: Sequence[float]
    timeline: str
    configuration: str  # TOML
    sample: str = ""  # generated text

    @property
    def peak(self) -> float:
        """Bytes of the rank that holds most."""
        return max((total(one) for one in self.memory), default=math.nan)

    @property
    def bubble(self) -> float:
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else math.nan

    @property
    def speed(self) -> float:
        """Samples a second, the median of the lines."""
        speeds = course(self.training, "samples_per_second")[:, VALUE]
        return float(np.median(speeds)) if len(speeds) else math.nan

    def final(self, metric: str) -> float:
        values = course(self.evaluations, metric)[:, VALUE]
        return float(values[-1]) if len(values) else math.nan


def total(memory: Mapping[str, int]) -> float:
    return memory["total"] if "total" in memory else sum(memory.values())


def by_group(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def course(lines: Sequence[Mapping[str, Any]], key: str) -> Course:
    """The lines that have a finite value, in order; of lines of the same update, the last."""
    rows: dict[float, Any] = {}
    for at, line in enumerate(lines):
        row: tuple[Any, ...] = (line.get("update", at), line.get("samples"), line.get("seconds"), line.get(key))
        if all(isinstance(value, int | float) and math.isfinite(value) for value in row):
            rows[row[UPDATE]] = row
    return np.array([rows[update] for update in sorted(rows)], dtype=np.float64).reshape(-1, 4)


def width(rows: Course) -> int:
    """How many lines on either side a value is smoothed over: about a thirtieth of all, together."""
    return len(rows) // 60


def smoothed(rows: Course) -> Course:
    """Each value the mean of those around it: as many before as after, and near the end as many as there are."""
    if not len(rows):
        return rows
    at, half = np.arange(len(rows)), width(rows)
    first, last = at - np.minimum(at, half), np.minimum(at + np.minimum(at, half), len(rows) - 1)
    sums = np.concatenate([[0.0], np.cumsum(rows[:, VALUE])])
    return np.column_stack([rows[:, :VALUE], (sums[last + 1] - sums[first]) / (last + 1 - first)])


def thinned(rows: Course, most: int = POINTS) -> Course:
    """At most so many rows, each the mean of those that it stands for."""
    if len(rows) <= most:
        return rows
    edges = np.linspace(0, len(rows), most, endpoint=False).astype(int)
    mean: Course = np.add.reduceat(rows, edges) / np.diff([*edges, len(rows)])[:, None]
    return mean


def mean(courses: Sequence[Course]) -> Course:
    """The mean of several runs at the updates that all of them have."""
    common = functools.reduce(np.intersect1d, [rows[:, UPDATE] for rows in courses])
    return np.asarray(np.mean([rows[np.isin(rows[:, UPDATE], common)] for rows in courses], axis=0))


def measured(metric: str, value: float) -> str:
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.3f}" if abs(value) < 100 else short(value)


def reading(runs: Sequence[Run], metric: str, reference: tuple[str, float] | None) -> str:
    """What was trained and what came of it, in a few sentences."""
    said = _one(runs[0], metric, reference) if len(runs) == 1 else _several(runs, metric)
    kept = sum(len(course(run.training, "loss")) for run in runs)
    lost = sum(len({line.get("update", at) for at, line in enumerate(run.training)}) for run in runs) - kept
    if lost:
        said.append(f"{lost:,} of {lost + kept:,} training lines have no finite loss and are left out.")
    return " ".join(said)


def _one(run: Run, metric: str, reference: tuple[str, float] | None) -> list[str]:
    said = []
    losses, values = course(run.training, "loss"), course(run.evaluations, metric)
    if len(losses):
        update, samples, seconds, _ = losses[-1]
        said.append(
            f"{run.name}: {_count(update, 'update')}, {_count(samples, 'sample')}, in {format_duration(seconds)}."
        )
        first, last = smoothed(losses)[[0, -1], VALUE]
        said.append(_change(first, last) if len(losses) > 1 else f"The training loss was {last:.3f}.")
    if len(values):
        better = np.argmax if higher_is_better(metric) else np.argmin
        best, last = values[better(values[:, VALUE])], values[-1]
        text = f"On validation data the {metric} was {measured(metric, last[VALUE])} at the end"
        if best[VALUE] == last[VALUE]:
            said.append(text + (", the best of all evaluations." if len(values) > 1 else "."))
        else:
            said.append(f"{text}, and best after {best[SAMPLES]:,.0f} samples: {measured(metric, best[VALUE])}.")
    else:
        said.append("It was not evaluated on validation data.")
    said += _against(run, losses, reference) + _idle(run) + _held(run)
    return said


def _count(amount: float, noun: str) -> str:
    return f"{amount:,.0f} {noun if amount == 1 else noun + 's'}"


def _change(first: float, last: float) -> str:
    if abs(last - first) < 0.02 * abs(first):
        return f"The training loss stayed near {last:.3f}."
    return f"The training loss {'fell' if last < first else 'rose'} from {first:.3f} to {last:.3f}."


def _against(run: Run, losses: Course, reference: tuple[str, float] | None) -> list[str]:
    values = course(run.evaluations, "loss")
    which, rows = ("validation", values) if len(values) else ("training", smoothed(losses))
    if not reference or not len(rows):
        return []
    last = rows[-1, VALUE]
    side = "below" if last < reference[1] else "above"
    return [f"At the end the {which} loss is {side} the {reference[0]} ({reference[1]:.3f})."]


def _idle(run: Run) -> list[str]:
    if not run.bubbles:
        return []
    worst = max(range(len(run.bubbles)), key=run.bubbles.__getitem__)
    most = f", rank {worst} most, {run.bubbles[worst]:.1%}" if len(run.bubbles) > 1 else ""
    return [f"The ranks waited {run.bubble:.1%} of the time on average (the bubble){most}."]


def _held(run: Run) -> list[str]:
    if not run.memory:
        return []
    rank = max(range(len(run.memory)), key=lambda at: total(run.memory[at]))
    parts = {name: value for name, value in run.memory[rank].items() if name != "total"}
    largest = max(parts, key=parts.__getitem__, default="")
    share = f", {parts[largest] / run.peak:.0%} of it {plain(largest)}" if run.peak and len(parts) > 1 else ""
    return [f"The largest rank, rank {rank}, held {format_bytes(run.peak)} at its peak{share}."]


def plain(category: str) -> str:
    return category.replace("_", " ")


def average(members: Iterable[Run], value: Callable[[Run], float]) -> float:
    known = [one for one in map(value, members) if math.isfinite(one)]
    return sum(known) / len(known) if known else math.nan


def ranking(groups: Mapping[str, Sequence[Run]], value: Callable[[Run], float]) -> list[tuple[float, str]]:
    """The groups that have a value, the lowest first: the mean of their runs."""
    return sorted((one, name) for name, members in groups.items() if math.isfinite(one := average(members, value)))


def headline(runs: Sequence[Run], metric: str) -> dict[str, str]:
    """The best of several runs in figures, by group."""
    wanted: list[tuple[str, Callable[[Run], float], bool, Callable[[float], str]]] = [
        (
            f"best final {metric}",
            lambda run: run.final(metric),
            higher_is_better(metric),
            lambda value: measured(metric, value),
        ),
        ("fastest", lambda run: run.speed, True, SPEED),
        ("smallest bubble", lambda run: run.bubble, False, SHARE),
        ("least memory, largest rank", lambda run: run.peak, False, format_bytes),
    ]
    found = {}
    for label, value, more, text in wanted:
        order = ranking(by_group(runs), value)
        if order:
            best, name = order[-1 if more else 0]
            found[label] = f"{name}: {text(best)}"
    return found


def _several(runs: Sequence[Run], metric: str) -> list[str]:
    groups = by_group(runs)
    counts = sorted(map(len, groups.values()))
    seeds = counts[-1]
    each = f", {'up to ' * (counts[0] < seeds)}{seeds} runs each" if seeds > 1 else ""
    said = [f"{len(runs)} runs: {', '.join(groups)}{each}."]
    order = ranking(groups, lambda run: run.final(metric))
    if higher_is_better(metric):
        order.reverse()
    if len(order) > 1:
        (best, first), (worst, last) = order[0], order[-1]
        said.append(
            f"At the end, {first} had the best {metric} on validation data, {measured(metric, best)}, "
            f"and {last} the worst, {measured(metric, worst)}{' (means of the runs)' if seeds > 1 else ''}."
        )
        said.append(_chance(groups, metric, abs(worst - best), seeds))
    said += _extremes(groups, "{1} ran fastest, {3}, and {0} slowest, {2}.", lambda run: run.speed, SPEED)
    said += _extremes(groups, "{0} waited least, {2} of the time, and {1} most, {3}.", lambda run: run.bubble, SHARE)
    said += _extremes(
        groups, "{0} needed least memory, {2} a rank, and {1} most, {3}.", lambda run: run.peak, format_bytes
    )
    return said


def _extremes(
    groups: Mapping[str, Sequence[Run]], words: str, value: Callable[[Run], float], text: Callable[[float], str]
) -> list[str]:
    """The lowest and the highest group, unless they look the same."""
    order = ranking(groups, value)
    if not order or text(order[0][0]) == text(order[-1][0]):
        return []
    (low, first), (high, last) = order[0], order[-1]
    return [words.format(first, last, text(low), text(high))]


def _chance(groups: Mapping[str, Sequence[Run]], metric: str, apart: float, seeds: int) -> str:
    """How much the differences mean, as far as a few runs can tell."""
    if seeds == 1:
        return "There is one run of each, so small differences may be chance."
    finals = [[one for run in members if math.isfinite(one := run.final(metric))] for members in groups.values()]
    spread = max(max(values) - min(values) for values in finals if values)
    much = "less, which may be chance" if apart < spread else "more"
    return f"Runs of one kind differ by up to {measured(metric, spread)}, the best and the worst kind by {much}."

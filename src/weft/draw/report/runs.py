"""The runs that a report shows, and their logged values as series: read, smoothed, thinned and averaged.

Charts and sentences use the same series, so that they agree. Values that are missing or not finite are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400  # per curve; more are not visible

UPDATE, SAMPLES, SECONDS, VALUE = range(4)
Series = NDArray[np.float64]  # one row per line, with these four columns


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a report. The report leaves out whatever is empty.

    training     lines with `update`, `samples`, `seconds`, `loss`, and optionally `lr` and `samples_per_second`
    evaluations  lines with `update`, `samples`, `seconds`, `loss`, and `perplexity` or `accuracy` (0 to 1)
    memory       peak bytes of each rank by category, and "total"
    resident     the resident set of each process, by its name: "peak", and the parts of the peak
    bubbles      the share of its time that each rank waited, 0 to 1
    speed        samples per second of the whole training time
    timeline     an SVG, from `weft.draw.svg`
    """

    name: str  # unique in the report, such as "wpipe, seed 0"
    group: str  # runs of a group, such as the seeds of a schedule, share a colour
    figures: Mapping[str, str]  # key figures: label -> text
    training: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    memory: Sequence[Mapping[str, int]]
    bubbles: Sequence[float]
    timeline: str
    configuration: str  # TOML
    sample: str = ""  # generated text
    resident: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    speed: float = math.nan

    @property
    def peak(self) -> float:
        """Peak bytes of the largest rank."""
        return max(map(total_bytes, self.memory), default=math.nan)

    @property
    def bubble(self) -> float:
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else math.nan

    def final(self, metric: str) -> float:
        values = series(self.evaluations, metric)[:, VALUE]
        return float(values[-1]) if len(values) else math.nan


def total_bytes(memory: Mapping[str, int]) -> float:
    return memory["total"] if "total" in memory else sum(memory.values())


def by_group(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def average(runs: Iterable[Run], value: Callable[[Run], float]) -> float:
    """The mean over the runs whose value is finite."""
    values = [number for number in map(value, runs) if math.isfinite(number)]
    return sum(values) / len(values) if values else math.nan


def series(lines: Sequence[Mapping[str, Any]], key: str) -> Series:
    """The lines with a finite value, sorted by update; of lines for the same update, the last."""
    rows: dict[float, Any] = {}
    for index, line in enumerate(lines):
        row: tuple[Any, ...] = (line.get("update", index), line.get("samples"), line.get("seconds"), line.get(key))
        if all(isinstance(value, int | float) and math.isfinite(value) for value in row):
            rows[row[UPDATE]] = row
    return np.array([rows[update] for update in sorted(rows)], dtype=np.float64).reshape(-1, 4)


def smoothing_radius(rows: Series) -> int:
    """The number of lines before and after a value that it is averaged with: a thirtieth of all lines in total."""
    return len(rows) // 60


def smoothed(rows: Series) -> Series:
    """A centred moving average. The window shrinks at the start and is cut off at the end."""
    if not len(rows):
        return rows
    index, radius = np.arange(len(rows)), smoothing_radius(rows)
    first, last = index - np.minimum(index, radius), np.minimum(index + np.minimum(index, radius), len(rows) - 1)
    sums = np.concatenate([[0.0], np.cumsum(rows[:, VALUE])])
    return np.column_stack([rows[:, :VALUE], (sums[last + 1] - sums[first]) / (last + 1 - first)])


def thinned(rows: Series, limit: int = MAX_POINTS) -> Series:
    """At most `limit` rows, each the mean of the rows it replaces."""
    if len(rows) <= limit:
        return rows
    edges = np.linspace(0, len(rows), limit, endpoint=False).astype(int)
    means: Series = np.add.reduceat(rows, edges) / np.diff([*edges, len(rows)])[:, None]
    return means


def mean_series(all_series: Sequence[Series]) -> Series:
    """The mean of several runs, at the updates that they all have."""
    common = functools.reduce(np.intersect1d, [rows[:, UPDATE] for rows in all_series])
    return np.asarray(np.mean([rows[np.isin(rows[:, UPDATE], common)] for rows in all_series], axis=0))

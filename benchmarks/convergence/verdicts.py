"""The difference of each method to synchronous training of the same seed and correction, and its upper bound."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.methods import BASE, CORRECTIONS, EVERY
from benchmarks.convergence.plan import TUNING_SEED, Found, Settings, best_settings, run_of
from benchmarks.convergence.studies import QUICK, STUDIES, Study
from benchmarks.harness import Results

# Of Student's t: 95 % are below, by degrees of freedom.
QUANTILES = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761),
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Paired differences of held-out loss, seed by seed; more is worse."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def upper(self) -> float:
        """The one-sided upper 95 % bound of the mean; infinite with fewer than two seeds."""
        if (seeds := len(self.values)) < 2:
            return math.inf
        return self.mean + QUANTILES[seeds - 2] * statistics.stdev(self.values) / math.sqrt(seeds)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A method with a correction in one study, over its seeds."""

    study: str
    method: str
    correction: str
    tuned: bool  # or it ran before the search found better settings
    delay: float  # mean, in updates
    losses: dict[int, float]  # by seed, of those that did not diverge
    metrics: dict[int, float]
    diverged: int
    gap: Gap | None  # to synchronous training; None for that itself, and if no seed ended in both
    lost: Gap | None  # of the metric, to synchronous training
    judged_by_loss: bool  # or by the metric
    curve: tuple[float | None, ...]  # mean training loss

    @property
    def judged(self) -> Gap | None:
        """What the study is judged by."""
        return self.gap if self.judged_by_loss else self.lost

    @property
    def label(self) -> str:
        return self.method if self.correction == "plain" else f"{self.method}, {self.correction}"


def cells(results: Results) -> Iterator[Cell]:
    """All cells that have results, study by study, in the order of the methods."""
    for name, study in results["studies"].items():
        best = settings_of(results, name)
        found: dict[tuple[str, str], dict[Settings, dict[int, Any]]] = {}
        for run in results["runs"]:
            if (run["study"], run["updates"]) == (name, study["updates"]) and run["seed"] != TUNING_SEED:
                by_settings = found.setdefault((run["method"], run["correction"]), {})
                by_settings.setdefault(Settings(**run["settings"]), {})[run["seed"]] = run
        current = {place: best[EVERY[place[0]].profile, place[1]] for place in found}
        chosen = {place: _chosen(by_settings, current[place]) for place, by_settings in found.items()}
        for method, correction in itertools.product(EVERY, CORRECTIONS):
            place, base = (method, correction), (BASE, correction)
            if place in chosen:
                against = found[base][chosen[base]] if base in chosen else {}
                tuned = chosen[place] == current[place]
                yield _cell(results, name, method, correction, found[place][chosen[place]], against, tuned=tuned)


def _chosen(found: Mapping[Settings, Mapping[int, Any]], best: Settings) -> Settings:
    """Those with the most seeds; of several the best ones, or the latest."""
    rows = [(len(runs), settings == best, place) for place, (settings, runs) in enumerate(found.items())]
    return list(found)[max(rows)[-1]]


def settings_of(results: Results, name: str) -> dict[tuple[str, str], Settings]:
    """The best settings so far, by profile and correction."""
    found, study = found_in(results), study_of(results, name)
    places = {(method.profile, correction) for method in EVERY.values() for correction in method.corrections}
    return {place: best_settings(name, study, *place, found) for place in places}


def found_in(results: Results) -> Found:
    """All runs, and their held-out losses."""
    return {run_of(entry): entry["loss"] for entry in results["runs"]}


def study_of(results: Results, name: str) -> Study:
    return (STUDIES if results["form"] == "whole" else QUICK)[name]


def _cell(
    results: Results,
    study: str,
    method: str,
    correction: str,
    runs: dict[int, Any],
    base: dict[int, Any],
    *,
    tuned: bool,
) -> Cell:
    points = zip(*(run["curve"] for run in runs.values()), strict=True)
    losses, metrics = _ended(runs, "loss"), _ended(runs, "metric")
    return Cell(
        study=study,
        method=method,
        correction=correction,
        tuned=tuned,
        delay=results["delays"][method],
        losses=losses,
        metrics=metrics,
        diverged=len(runs) - len(losses),
        gap=None if method == BASE else gap_between(losses, _ended(base, "loss")),
        lost=None if method == BASE else gap_between(_ended(base, "metric"), metrics),
        judged_by_loss=study_of(results, study).judged_by_loss,
        curve=tuple(None if None in point else statistics.mean(point) for point in points),
    )


def gap_between(losses: dict[int, float], base: dict[int, float]) -> Gap | None:
    """Of the seeds that both have."""
    values = tuple(losses[seed] - base[seed] for seed in sorted(losses.keys() & base.keys()))
    return Gap(values=values) if values else None


def _ended(runs: dict[int, Any], key: str) -> dict[int, float]:
    return {seed: run[key] for seed, run in runs.items() if run[key] is not None}

"""Accuracy: what staleness and prediction do to training, on real data.

For each study and optimizer the learning rate is the best of synchronous training, found by a sweep on seeds of its
own; then every method trains with that rate. The claim that is tested: `wpipe` and `xpipe` end within seed noise of
synchronous training.
"""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from weft.bench.convergence.pages import missed, plots, tables
from weft.bench.convergence.speed import rates_beside
from weft.bench.convergence.studies import OPTIMIZERS, QUICK, STUDIES, SYNCHRONOUS, Run, comparisons
from weft.bench.kept import Keep

__all__ = ["measure", "missed", "plots", "tables"]

FURTHER = 4  # rates beyond those of the sweep, at the most, while the best is at its edge


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """The rates tried, the rates chosen, and what came out of every run."""
    from weft.bench.convergence.training import all_of, data_folder

    studies = QUICK if quick else STUDIES
    for study in studies.values():
        study.sets(data_folder())  # refuses missing files before the first run
    sweeps: dict[tuple[str, str], dict[float, float | None]] = {
        (name, optimizer): {} for name in studies for optimizer in OPTIMIZERS
    }
    wanted = {place: list(studies[place[0]].rates[place[1]]) for place in sweeps}
    for _ in range(1 + (0 if quick else FURTHER)):
        runs = {
            (place, rate): [_sweep(*place, rate, seed) for seed in studies[place[0]].sweep_seeds]
            for place, rates in wanted.items()
            for rate in rates
        }
        found = all_of(list(chain.from_iterable(runs.values())), quick=quick, keep=keep)
        for (place, rate), some in runs.items():
            losses = [found[run]["loss"] for run in some]
            sweeps[place][rate] = None if None in losses else statistics.mean(losses)
        wanted = {place: beyond(tried) for place, tried in sweeps.items()}
    runs_of_all = [
        run
        for (name, optimizer), tried in sweeps.items()
        for run in comparisons(name, studies[name], optimizer, best(tried), quick=quick)
    ]
    found = all_of(runs_of_all, quick=quick, keep=keep)
    throughput = rates_beside(keep.folder)
    return {
        "studies": {
            name: {"title": one.title, "updates": one.updates, "batch": one.batch, "evaluated": one.evaluated}
            for name, one in studies.items()
        },
        "sweeps": {
            ", ".join(place): {f"{rate:g}": tried[rate] for rate in sorted(tried)} for place, tried in sweeps.items()
        },
        "runs": [vars(run) | found[run] for run in runs_of_all],
    } | ({"throughput": throughput} if throughput else {})


def best(tried: dict[float, float | None]) -> float:
    """The rate with the least held-out loss; one that diverged is the worst."""
    return min(tried, key=lambda rate: float("inf") if (loss := tried[rate]) is None else loss)


def beyond(tried: dict[float, float | None]) -> list[float]:
    """The next rate to try while the best one is at the edge."""
    low, chosen, high = min(tried), best(tried), max(tried)
    return [float(f"{low / 2:g}")] if chosen == low else [float(f"{high * 2:g}")] if chosen == high else []


def _sweep(study: str, optimizer: str, rate: float, seed: int) -> Run:
    return Run(study=study, method=SYNCHRONOUS, ranks=2, optimizer=optimizer, rate=rate, seed=seed)

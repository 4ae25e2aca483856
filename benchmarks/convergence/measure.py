"""Sweep the learning rate of synchronous training, then train every method with the best one."""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from benchmarks.convergence.speed import read_rates
from benchmarks.convergence.studies import OPTIMIZERS, QUICK, STUDIES, SYNCHRONOUS, Run, Study, comparisons
from benchmarks.convergence.training import train_all
from benchmarks.harness import ResumeCache, data_folder

EXTRA_RATES = 4  # at most, beyond those of the sweep, while the best is at its edge

Sweeps = dict[tuple[str, str], dict[float, float | None]]  # (study, optimizer) -> rate -> held-out loss


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """The rates tried, the rates chosen, and the result of every run."""
    studies = QUICK if quick else STUDIES
    for study in studies.values():
        study.sets(data_folder())  # raises if files are missing, before the first run
    sweeps = _sweep(studies, quick=quick, cache=cache)
    runs = [
        run
        for (name, optimizer), tried in sweeps.items()
        for run in comparisons(name, studies[name], optimizer, best(tried), quick=quick)
    ]
    found = train_all(runs, quick=quick, cache=cache)
    throughput = read_rates(cache.folder)
    return {
        "studies": {
            name: {"title": study.title, "updates": study.updates, "batch": study.batch, "evaluated": study.evaluated}
            for name, study in studies.items()
        },
        "sweeps": {
            ", ".join(place): {f"{rate:g}": tried[rate] for rate in sorted(tried)} for place, tried in sweeps.items()
        },
        "runs": [vars(run) | found[run] for run in runs],
    } | ({"throughput": throughput} if throughput else {})


def _sweep(studies: dict[str, Study], *, quick: bool, cache: ResumeCache) -> Sweeps:
    """Held-out losses of synchronous training, until the best rate of each sweep is not at its edge."""
    sweeps: Sweeps = {(name, optimizer): {} for name in studies for optimizer in OPTIMIZERS}
    wanted = {place: list(studies[place[0]].rates[place[1]]) for place in sweeps}
    for _ in range(1 + (0 if quick else EXTRA_RATES)):
        runs = {
            (place, rate): [_sweep_run(*place, rate, seed) for seed in studies[place[0]].sweep_seeds]
            for place, rates in wanted.items()
            for rate in rates
        }
        found = train_all(list(chain.from_iterable(runs.values())), quick=quick, cache=cache)
        for (place, rate), by_seed in runs.items():
            losses = [found[run]["loss"] for run in by_seed]
            sweeps[place][rate] = None if None in losses else statistics.mean(losses)
        wanted = {place: beyond(tried) for place, tried in sweeps.items()}
    return sweeps


def best(tried: dict[float, float | None]) -> float:
    """The rate with the least held-out loss; a diverged run is worst."""
    return min(tried, key=lambda rate: float("inf") if (loss := tried[rate]) is None else loss)


def beyond(tried: dict[float, float | None]) -> list[float]:
    """The next rate to try while the best one is at the edge."""
    low, chosen, high = min(tried), best(tried), max(tried)
    return [float(f"{low / 2:g}")] if chosen == low else [float(f"{high * 2:g}")] if chosen == high else []


def _sweep_run(study: str, optimizer: str, rate: float, seed: int) -> Run:
    return Run(study=study, method=SYNCHRONOUS, ranks=2, optimizer=optimizer, rate=rate, seed=seed)

"""Train with every schedule for the same time, seed by seed."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, ResumeCache
from benchmarks.wall_clock.jobs import SETTINGS, sets_of
from benchmarks.wall_clock.ranks import run
from weft import launch

SECONDS, TIMED = 1200.0, 100  # of a run; updates that measure the pace
SEEDS = (0, 1)


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Updates, seconds and held-out results, by schedule and seed."""
    seconds, timed, seeds = (2.0, 10, SEEDS[:1]) if quick else (SECONDS, TIMED, SEEDS)
    runs = []
    for seed in seeds:
        for name in SETTINGS:
            sets = sets_of(name, seed, quick=quick)
            found = cache(f"{name}, seed {seed}", partial(_train, sets, seconds, timed))
            runs.append({"schedule": name, "seed": seed, **found})
    return {"asked": seconds, "runs": runs}


def _train(sets: list[str], seconds: float, timed: int) -> dict[str, Any]:
    found: dict[str, Any] = launch(run, sets, seconds, timed, ranks=2, threads=1, timeout=START_TIMEOUT)[0]
    return found

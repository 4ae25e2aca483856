"""Train with every schedule for the same time. Each command adds one seed to what is recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, ResumeCache, describe_environment
from benchmarks.wall_clock.jobs import SEEDS, SETTINGS, sets_of
from benchmarks.wall_clock.ranks import run
from weft import launch

SECONDS, TIMED = 1200.0, 100  # of a run; updates that measure the pace


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Updates, seconds and held-out results, by schedule and seed."""
    seconds, timed = (2.0, 10) if quick else (SECONDS, TIMED)
    runs: list[dict[str, Any]] = cache.recorded().get("runs", [])
    environment = describe_environment("numpy", "torch")
    done = {entry["seed"] for entry in runs}
    for seed in [seed for seed in SEEDS if seed not in done][:1]:
        for name in SETTINGS:
            sets = sets_of(name, seed, quick=quick)
            found = cache(f"{name}, seed {seed}", partial(_train, sets, seconds, timed))
            runs.append({"schedule": name, "seed": seed, "environment": environment, **found})
    return {"asked": seconds, "runs": runs}


def _train(sets: list[str], seconds: float, timed: int) -> dict[str, Any]:
    found: dict[str, Any] = launch(run, sets, seconds, timed, ranks=2, threads=1, timeout=START_TIMEOUT)[0]
    return found

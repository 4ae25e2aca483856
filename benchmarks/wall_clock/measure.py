"""Train with every schedule for the same time, seed by seed."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, ResumeCache
from benchmarks.wall_clock.ranks import run
from weft import launch

SECONDS, TIMED = 1200.0, 100  # of a run; updates that measure the pace
SEEDS = (0, 1)
MODEL = (
    *("model.name=gpt", "model.layers=8", "model.width=256", "data.name=python", "data.context=64"),
    *("schedule.ranks=2", "schedule.microbatches=4", "evaluate.samples=3840", "evaluate.batch=96", "train.batch=32"),
)
TINY = ("model.layers=3", "model.width=32", "model.heads=2", "data.context=16", "evaluate.samples=96")
OPTIMIZER = (
    *("train.optimizer=adamw", "train.weight_decay=0.1", "train.warmup=100"),
    "schedule.cure=optimistic",  # helps synchronous training, too
)
BEST = ("train.lr=0.003", "train.betas=[0.8, 0.999]")  # of convergence for all four, at half the rate
SETTINGS = {
    "1f1b": ("schedule.name=1f1b", *BEST),
    "zb-h1": ("schedule.name=zb-h1", *BEST),
    "wpipe fresh": ("schedule.name=wpipe", "schedule.fresh=true", *BEST),
    "weave": ("schedule.name=weave", *BEST),
}
OPPONENTS = ("1f1b", "zb-h1")


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


def sets_of(name: str, seed: int, *, quick: bool) -> list[str]:
    """The settings of a job."""
    return [*MODEL, *(TINY if quick else ()), *OPTIMIZER, *SETTINGS[name], f"train.seed={seed}"]


def _train(sets: list[str], seconds: float, timed: int) -> dict[str, Any]:
    found: dict[str, Any] = launch(run, sets, seconds, timed, ranks=2, threads=1, timeout=START_TIMEOUT)[0]
    return found

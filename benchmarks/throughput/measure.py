"""Measure every contender on two models, and the cost of an action."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness import START_TIMEOUT, ResumeCache, installed_version
from benchmarks.throughput.engine import action_costs
from benchmarks.throughput.ranks import Race, join_ranks, run_races
from weft import launch

MODELS = ("transformer", "resnext")
MICROBATCHES = (2, 4, 8)
ROUNDS = 5
WINDOW = 1.5  # seconds of each contender in each round, without warming up
QUICK = {"transformer": 4, "resnext": 2}  # micro-batches


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Seconds a micro-batch of every contender in every round, of the limit beside it, and microseconds an action."""
    if quick:
        races = [Race(model, m, rounds=3, window=0.05, small=True) for model, m in QUICK.items()]
        models = {
            race.model: {str(race.microbatches): result} for race, result in zip(races, _run(*races), strict=True)
        }
        return {"deepspeed": installed_version("deepspeed"), "models": models, "engine": action_costs(rounds=2)}
    models = {
        model: {
            str(m): cache(f"{model}, m = {m}", partial(_run, Race(model, m, rounds=ROUNDS, window=WINDOW)))[0]
            for m in MICROBATCHES
        }
        for model in MODELS
    }
    return {
        "deepspeed": installed_version("deepspeed"),
        "models": models,
        "engine": cache("engine", partial(action_costs, rounds=ROUNDS)),
    }


def _run(*races: Race) -> list[dict[str, Any]]:
    return join_ranks(launch(run_races, races, ranks=2, threads=1, timeout=START_TIMEOUT))

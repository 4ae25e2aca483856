"""Throughput on two real ranks, over what both cores can do, beside what people would use instead.

`ranks.py` is what each rank runs, `engine.py` what an action costs, `pages.py` the targets, tables and pictures.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from weft.bench.deadline import START
from weft.bench.kept import Keep
from weft.bench.throughput.pages import missed, plots, tables
from weft.bench.writing import version_of

__all__ = ["measure", "missed", "plots", "tables"]

MODELS = ("transformer", "resnext")
MICROBATCHES = (2, 4, 8)
ROUNDS = 5
WINDOW = 1.5  # seconds of each contender in each round, beside what warms it up
QUICK = {"transformer": 4, "resnext": 2}  # micro-batches


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Seconds a micro-batch of every contender in every round, of the limit beside it, and microseconds an action."""
    from weft import launch
    from weft.bench.throughput.engine import engine
    from weft.bench.throughput.ranks import Job, together, work

    def run(*jobs: Job) -> list[dict[str, Any]]:
        return together(launch(work, jobs, ranks=2, threads=1, timeout=START))

    if quick:
        jobs = [Job(model, m, rounds=3, window=0.05, small=True) for model, m in QUICK.items()]
        found = {one.model: {str(one.microbatches): result} for one, result in zip(jobs, run(*jobs), strict=True)}
        return {"deepspeed": version_of("deepspeed"), "models": found, "engine": engine(rounds=2)}
    models = {
        model: {
            str(m): keep(f"{model}, m = {m}", partial(run, Job(model, m, rounds=ROUNDS, window=WINDOW)))[0]
            for m in MICROBATCHES
        }
        for model in MODELS
    }
    return {
        "deepspeed": version_of("deepspeed"),
        "models": models,
        "engine": keep("engine", lambda: engine(rounds=ROUNDS)),
    }

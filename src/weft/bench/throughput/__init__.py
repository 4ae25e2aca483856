"""Throughput on two real ranks, over what both cores can do, beside what people would use instead.

`ranks.py` is what each rank runs, `engine.py` what an action costs, `pages.py` the targets, tables and pictures.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from weft.bench.kept import Keep
from weft.bench.throughput.pages import missed, plots, tables

__all__ = ["measure", "missed", "plots", "tables"]

MODELS = {"transformer": 5, "resnext": 3}  # rounds
MICROBATCHES = (2, 4, 8)
WINDOW = 1.0  # seconds of each contender in each round, beside what warms it up
QUICK = {"transformer": 4, "resnext": 2}  # micro-batches
START = 300.0  # seconds in which the ranks have to be there, on a machine that is busy with other things


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Seconds a micro-batch of every contender in every round, of the limit, and microseconds an action."""
    from weft import launch
    from weft.bench.throughput.engine import engine
    from weft.bench.throughput.ranks import Job, together, work

    def run(*jobs: Job) -> list[dict[str, Any]]:
        return together(launch(work, jobs, ranks=2, threads=1, timeout=START))

    if quick:
        jobs = [Job(model, m, rounds=2, window=0.1, small=True) for model, m in QUICK.items()]
        found = {one.model: {str(one.microbatches): result} for one, result in zip(jobs, run(*jobs), strict=True)}
        return {"deepspeed": _deepspeed(), "models": found, "engine": engine(rounds=2)}
    models = {
        model: {
            str(m): keep(f"{model}, m = {m}", partial(run, Job(model, m, rounds=rounds, window=WINDOW)))[0]
            for m in MICROBATCHES
        }
        for model, rounds in MODELS.items()
    }
    return {"deepspeed": _deepspeed(), "models": models, "engine": keep("engine", lambda: engine(rounds=5))}


def _deepspeed() -> str | None:
    return version("deepspeed") if find_spec("deepspeed") else None

"""One run on virtual ranks, and many of them in a process for each core."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from weft.bench.convergence.studies import QUICK, STUDIES, Run, Study
from weft.bench.kept import Keep
from weft.errors import Diverged, RunError
from weft.train.job import job_of
from weft.train.peers import Peers
from weft.train.setup import Supply, net_of, pipeline_of, supply_of

POINTS = 24  # of a curve: each is the mean loss of as many updates as make so many points
DEADLINE = 1800.0  # of one run, in seconds


def data_folder() -> Path:
    """Where the data sets are."""
    return Path(os.environ.get("WEFT_DATA", "data")).absolute()


def all_of(runs: Sequence[Run], *, quick: bool, keep: Keep) -> dict[Run, Any]:
    """What came out of each run; those that are kept are not made again."""
    if quick:
        _alone()
        return {run: keep(str(run), partial(trained, run, quick)) for run in runs}
    if not (left := [run for run in runs if str(run) not in keep]):
        return {run: keep(str(run), dict) for run in runs}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), initializer=_alone) as pool:  # ended by leaving it
        found = pool.imap_unordered(_trained, left)
        for number in range(len(runs) - len(left) + 1, len(runs) + 1):
            try:
                run, value = found.next(timeout=DEADLINE)
            except multiprocessing.TimeoutError:
                raise RunError(
                    f"no run ended within {DEADLINE:g} s: a process may have been killed for its memory; "
                    "what ended is kept, go on with --resume"
                ) from None
            keep.add(str(run), value)
            keep.say(f"{number} of {len(runs)}: {run}")
    return {run: keep(str(run), dict) for run in runs}


def trained(run: Run, quick: bool) -> dict[str, Any]:
    """Train, then judge on held-out data: the curve of the training loss, and what is held against others.

    A run whose loss is not finite any more has diverged: it has no held-out figures.
    """
    study = (QUICK if quick else STUDIES)[run.study]
    job = job_of(None, run.sets(study, data_folder()))
    supply = replace(_opened(run.study, quick), job=job)
    net = net_of(job, supply.spec)
    losses: dict[int, float] = {}
    pipe = pipeline_of(job, net, supply.spec, updates=study.updates)
    try:
        for update in range(study.updates):
            batch = supply.batch(update)
            result = pipe.step(batch.inputs, batch.targets)
            if result.loss is not None and result.minibatch is not None:
                losses[result.minibatch] = result.loss
        pipe.flush()
        found = pipe.evaluate(supply.held_out(), metrics=net.metrics or {})
    except Diverged:
        return {"curve": _curve(losses, study), "loss": None, "metric": None}
    finally:
        pipe.close()
    finite = math.isfinite(found["loss"])
    return {
        "curve": _curve(losses, study),
        "loss": found["loss"] if finite else None,
        "metric": found[study.metric] if finite else None,
    }


def _trained(run: Run) -> tuple[Run, dict[str, Any]]:
    return run, trained(run, False)


def _curve(losses: dict[int, float], study: Study) -> list[float | None]:
    """Mean losses of equal parts of the run; None from where it diverged."""
    size = max(1, study.updates // POINTS)
    parts = [
        [loss for at in range(start, start + size) if (loss := losses.get(at)) is not None]
        for start in range(0, study.updates, size)
    ]
    return [sum(part) / len(part) if part and all(map(math.isfinite, part)) else None for part in parts]


def _alone() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _opened(name: str, quick: bool) -> Supply:
    """The data of a study, whose samples depend on no run."""
    study = (QUICK if quick else STUDIES)[name]
    return supply_of(job_of(None, study.sets(data_folder())), Peers(deadline=60.0))

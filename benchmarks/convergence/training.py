"""Train a run on virtual ranks, and many runs in a process for each core."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks.convergence.studies import QUICK, STUDIES, Run, Study
from benchmarks.harness import ResumeCache, data_folder
from weft.errors import Diverged, RunError
from weft.runtime.comm import Collectives
from weft.train.job import job_of
from weft.train.setup import RankData, net_of, open_rank_data, pipeline_of

POINTS = 24  # of a curve: each is the mean loss of an equal part of the updates
RUN_TIMEOUT = 1800.0  # seconds


def train_all(runs: Sequence[Run], *, quick: bool, cache: ResumeCache) -> dict[Run, Any]:
    """The result of each run; those in the cache are not repeated."""
    if quick:
        _use_one_thread()
        return {run: cache(str(run), partial(train, run, quick)) for run in runs}
    if not (left := [run for run in runs if str(run) not in cache]):
        return {run: cache(str(run), dict) for run in runs}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), initializer=_use_one_thread) as pool:
        found = pool.imap_unordered(_train, left)
        for number in range(len(runs) - len(left) + 1, len(runs) + 1):
            try:
                run, value = found.next(timeout=RUN_TIMEOUT)
            except multiprocessing.TimeoutError:
                raise RunError(
                    f"no run ended within {RUN_TIMEOUT:g} s; a process may have been killed for its memory; "
                    "finished runs are stored, continue with --resume"
                ) from None
            cache.add(str(run), value)
            cache.log(f"{number} of {len(runs)}: {run}")
    return {run: cache(str(run), dict) for run in runs}


def train(run: Run, quick: bool) -> dict[str, Any]:
    """Train, then evaluate on held-out data: the curve of the training loss, the held-out loss and metric.

    A run whose loss is no longer finite has diverged: it has no held-out loss and metric.
    """
    study = (QUICK if quick else STUDIES)[run.study]
    job = job_of(None, run.sets(study, data_folder()))
    supply = replace(_open_data(run.study, quick), job=job)
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


def _train(run: Run) -> tuple[Run, dict[str, Any]]:
    return run, train(run, False)


def _curve(losses: dict[int, float], study: Study) -> list[float | None]:
    """Mean losses of equal parts of the run; None after it diverged."""
    size = max(1, study.updates // POINTS)
    parts = [
        [loss for update in range(start, start + size) if (loss := losses.get(update)) is not None]
        for start in range(0, study.updates, size)
    ]
    return [sum(part) / len(part) if part and all(map(math.isfinite, part)) else None for part in parts]


def _use_one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _open_data(name: str, quick: bool) -> RankData:
    """The data of a study, whose samples do not depend on the run."""
    study = (QUICK if quick else STUDIES)[name]
    return open_rank_data(job_of(None, study.sets(data_folder())), Collectives(deadline=60.0))

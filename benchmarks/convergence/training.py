"""Train a run on virtual ranks, and many runs in a process for each core."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from benchmarks.convergence.corrections import CURES, OPTIMIZERS
from benchmarks.convergence.plan import Run
from benchmarks.convergence.studies import QUICK, STUDIES, Study
from benchmarks.harness import data_folder, exit_after, exit_with_parent
from weft.errors import Diverged, RunError
from weft.runtime.comm import Collectives
from weft.train.job import job_of
from weft.train.setup import RankData, net_of, open_rank_data, pipeline_of

POINTS = 25  # of a curve: each is the mean loss of an equal part of the updates
RUN_TIMEOUT = 3600.0  # seconds


def train_all(runs: Sequence[Run], *, quick: bool, until: float = math.inf) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Each run with its result, as they end; no run is started after the time `until`."""
    if quick:
        use_one_thread()
        yield from ((run, train(run, quick=True)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    left, cores = list(reversed(runs)), os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=context, initializer=_enter_worker, initargs=(os.getpid(),)) as pool:
        started: dict[Future[dict[str, Any]], Run] = {}
        while True:
            while left and len(started) < cores and time.time() < until:
                run = left.pop()
                started[pool.submit(_train_in_time, run)] = run
            if not started:
                return
            ended, _ = wait(started, return_when=FIRST_COMPLETED)  # each ends in time, or its process does
            for future in ended:
                run = started.pop(future)
                try:
                    yield run, future.result()
                except BrokenProcessPool:
                    raise RunError(
                        f"{run}: a process was killed, or did not end within {RUN_TIMEOUT:g} s (then its stacks are "
                        "above); the runs that ended are stored, use --resume"
                    ) from None


def _train_in_time(run: Run) -> dict[str, Any]:
    with exit_after(RUN_TIMEOUT):
        return train(run, quick=False)


def train(run: Run, *, quick: bool) -> dict[str, Any]:
    """Train, then evaluate on held-out data: the curve of the training loss, the held-out loss and metric.

    No run is evaluated before its end: an evaluation flushes an asynchronous pipeline and so makes it less stale. A run
    whose loss is no longer finite has diverged: it has no held-out loss and metric.
    """
    study = (QUICK if quick else STUDIES)[run.study]
    job = job_of(None, run.sets(study, data_folder()))
    supply = replace(_open_data(run.study, quick), job=job)
    net = net_of(job, supply.spec)
    losses: dict[int, float] = {}
    made = OPTIMIZERS.get(run.correction)
    optimizer, cure = made and made(job.train), CURES.get(run.correction)
    pipe = pipeline_of(job, net, supply.spec, updates=run.updates, other_optimizer=optimizer, other_cure=cure)
    try:
        for update in range(run.updates):
            batch = supply.batch(update)
            result = pipe.step(batch.inputs, batch.targets)
            if result.loss is not None and result.minibatch is not None:
                losses[result.minibatch] = result.loss
        pipe.flush()
        found = pipe.evaluate(supply.held_out(), metrics=net.metrics or {})
    except Diverged:
        return {"curve": _curve(losses, run.updates), "loss": None, "metric": None}
    finally:
        pipe.close()
    finite = math.isfinite(found["loss"])
    return {
        "curve": _curve(losses, run.updates),
        "loss": found["loss"] if finite else None,
        "metric": found[study.metric] if finite else None,
    }


def _curve(losses: dict[int, float], updates: int) -> list[float | None]:
    """Mean losses of equal parts of the run; None after it diverged."""
    size = max(1, updates // POINTS)
    parts = [
        [loss for update in range(start, start + size) if (loss := losses.get(update)) is not None]
        for start in range(0, updates, size)
    ]
    return [round(sum(part) / len(part), 4) if part and all(map(math.isfinite, part)) else None for part in parts]


def _enter_worker(parent: int) -> None:
    exit_with_parent(parent)
    use_one_thread()


def use_one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _open_data(name: str, quick: bool) -> RankData:
    """The data of a study, whose samples do not depend on the run."""
    study: Study = (QUICK if quick else STUDIES)[name]
    return open_rank_data(job_of(None, study.sets(data_folder())), Collectives(deadline=60.0))

"""The process of `weft train`: starts the ranks, forwards requests to stop, restarts the ranks when one dies.

Under torchrun there is no such process: each rank trains on its own, and torchrun has its own restarts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError
from weft.runtime.checkpoint import inspect
from weft.runtime.process import keep_freed_memory, launch
from weft.train.config import to_toml
from weft.train.job import Job, ranks_of, schedule_of
from weft.train.reporting import write_report
from weft.train.run import Folder
from weft.train.signals import stop_within


def run(
    job: Job,
    folder: Folder,
    *,
    checkpoint: str = "",
    max_restarts: int = 0,
    show: str = "live",
    new_data: bool = False,
) -> dict[str, Any]:
    """Train a job to its end in a folder, from a checkpoint (`latest`, …) if one is named; the summary.

    `new_data`: the data may differ from the checkpoint's, also after a restart.
    """
    start, unsupervised = None, job.schedule.virtual or is_rank()
    if unsupervised and max_restarts:
        reason = "torchrun has its own --max-restarts" if is_rank() else "virtual ranks die with this process"
        raise WeftError(f"--max-restarts is for the processes that weft starts; {reason}, so leave it out")
    if checkpoint:
        job, start = _find_start(job, folder, checkpoint)
    if is_first():
        if not checkpoint:
            folder.write_job(to_toml(job))
        folder.sweep()
    train = _train_here if unsupervised else _train_supervised
    try:
        summary = train(job, folder, start, max_restarts, show, new_data)
    except WeftError:
        if is_first() and not checkpoint:
            folder.remove_unused()  # a mistake that only ranks notice must not use up the name
        raise
    if is_first():
        write_report(folder)
    return summary


def _find_start(job: Job, folder: Folder, which: str) -> tuple[Job, str | None]:
    """A checkpoint that is verified to the last byte, before any rank is started; and the job, partitioned as it was.

    Measured times differ from start to start, and under an asynchronous schedule the partition affects the result.
    """
    path = folder.find(which)
    if path is None:
        return job, None
    try:
        layers = inspect(path)["extra"]["layers"]
    except (WeftError, KeyError, TypeError) as problem:
        cause = str(problem) if isinstance(problem, WeftError) else f"checkpoint {path} is not of weft train"
        raise WeftError(f"{cause}, such as the one before it: --checkpoint previous") from None
    if job.schedule.balance == "time" and not job.schedule.layers and len(layers) == schedule_of(job).chunks:
        job = replace(job, schedule=replace(job.schedule, layers=layers))
    return job, str(path)


def _train_here(
    job: Job, folder: Folder, start: str | None, max_restarts: int, show: str, new_data: bool
) -> dict[str, Any]:
    """As the rank that this process is, or with all ranks as virtual ones."""
    import torch

    if job.schedule.virtual:
        keep_freed_memory()
        torch.set_num_threads(job.train.threads)
        return _train_rank(job, str(folder), start, 0, show, new_data)
    ranks = ranks_of(job)
    return launch(_train_rank, job, str(folder), start, 0, show, new_data, ranks=ranks, threads=job.train.threads)[0]


def _train_supervised(
    job: Job, folder: Folder, start: str | None, max_restarts: int, show: str, new_data: bool
) -> dict[str, Any]:
    restarts = 0
    with stop_within(job.checkpoint.grace) as stop:
        while True:
            try:
                arguments = (job, str(folder), start, restarts, show, new_data)
                return launch(_train_rank, *arguments, ranks=ranks_of(job), threads=job.train.threads, stop=stop)[0]
            except RunError as problem:
                _show_cursor()
                if problem.mistake is not None:
                    raise WeftError(problem.mistake) from problem
                if (summary := folder.summary()) is not None:  # a rank died after the run had ended
                    return summary
                if restarts == max_restarts or stop.is_set():
                    raise
                restarts += 1
                job, start = _find_start(job, folder, "latest")
                where = "the beginning" if start is None else os.path.basename(start)
                cause = str(problem).splitlines()[0]
                print(f"weft: {cause}; restart {restarts} of {max_restarts}, from {where}", file=sys.stderr, flush=True)
                folder.sweep()


def _train_rank(*arguments: Any) -> dict[str, Any]:
    """What a rank runs; the process that starts ranks does not import it."""
    from weft.train.train_job import train_job

    return train_job(*arguments)


def _show_cursor() -> None:
    """A killed rank may have left the terminal without a cursor."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")

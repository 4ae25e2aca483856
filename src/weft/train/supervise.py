"""The process of `weft train`: owns the folder, starts the ranks, forwards requests to stop, restarts ranks that died.

Under torchrun there is no such process: each rank is a command of its own, and torchrun has its own restarts.
"""

from __future__ import annotations

import shlex
import sys
import uuid
from typing import Any

from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError
from weft.output import warn
from weft.runtime.process import configure_malloc, launch
from weft.train.job import Job, ranks_of
from weft.train.reporting import write_report
from weft.train.run import Folder
from weft.train.signals import stop_within
from weft.train.start import Request, Start, decide, owned_folder


def run(
    job: Job, request: Request, *, found: Folder | None = None, max_restarts: int = 0, show: str = "live"
) -> tuple[dict[str, Any], Folder]:
    """Train a job to its end; the summary, and the folder of the run. `found` is that of a run to resume."""
    if max_restarts and (job.schedule.virtual or is_rank()):
        reason = "torchrun has its own --max-restarts" if is_rank() else "virtual ranks die with this process"
        raise WeftError(f"--max-restarts is for the processes that weft starts; {reason}, so leave it out")
    if is_rank() and not job.schedule.virtual:
        summary, place = launch(
            _train_joined, job, request, None if found is None else str(found), show, **_rank_options(job)
        )[0]
        folder = Folder(place)
    else:
        train = _train_virtual if job.schedule.virtual else _train_supervised
        with owned_folder(job, request, found) as folder:
            summary = train(job, folder, request, max_restarts, show)
            if is_first():
                write_report(folder)
    return summary, folder


def _rank_options(job: Job) -> dict[str, Any]:
    limits = {"timeout": job.schedule.timeout, "deadline": job.schedule.deadline}
    return {"ranks": ranks_of(job), "threads": job.train.threads} | limits


def _train_virtual(job: Job, folder: Folder, request: Request, max_restarts: int, show: str) -> dict[str, Any]:
    """With all ranks as virtual ones in this process."""
    import torch

    start = decide(job, folder, request, invocation=uuid.uuid4().hex)
    if isinstance(start, dict):
        return start
    configure_malloc()
    torch.set_num_threads(job.train.threads)
    return _train_rank(start, str(folder), show)


def _train_supervised(job: Job, folder: Folder, request: Request, max_restarts: int, show: str) -> dict[str, Any]:
    restarts, invocation = 0, uuid.uuid4().hex
    with stop_within(job.checkpoint.grace) as stop:
        while True:
            folder.check_owned()
            try:
                start = decide(job, folder, request, invocation=invocation, restarts=restarts)
                if isinstance(start, dict):
                    return start
                if restarts:
                    warn(f"restart {restarts} of {max_restarts}, from {start.place}")
                return launch(_train_rank, start, str(folder), show, stop=stop, **_rank_options(job))[0]
            except RunError as problem:
                _show_cursor()
                if problem.mistake is not None:
                    raise WeftError(problem.mistake) from problem
                if (summary := folder.results_of(invocation)) is not None:
                    return summary  # a rank died after the run had ended
                if restarts == max_restarts or stop.is_set():
                    if folder.begun_by() == invocation and folder.names():
                        warn(f"resume with: weft train --resume {shlex.quote(str(folder))}")
                    raise
                restarts += 1
                warn(str(problem).splitlines()[0])


def _train_rank(start: Start, folder: str, show: str) -> dict[str, Any]:
    """What a rank runs; the process that starts ranks does not import it."""
    from weft.train.train_job import train_job

    return train_job(start, Folder(folder), show)


def _train_joined(job: Job, request: Request, found: str | None, show: str) -> tuple[dict[str, Any], str]:
    """What a rank of torchrun runs: its summary, and the folder."""
    from weft.train.joined import joined_start
    from weft.train.setup import collectives_of, long_deadline

    collectives, run = collectives_of(job), None if found is None else Folder(found)
    with joined_start(job, request, run, collectives, deadline=long_deadline(job)) as (folder, start):
        summary = start if isinstance(start, dict) else _train_rank(start, str(folder), show)
        if is_first():
            write_report(folder)
    return summary, str(folder)


def _show_cursor() -> None:
    """A killed rank may have left the terminal without a cursor."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")

"""The process that `weft train` is: starts the ranks, passes on a wish to stop, starts them again when one dies.

Under torchrun there is no such process: each rank calls `train` by itself, and torchrun has restarts of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.environment import is_first, is_rank
from weft.errors import RunError, WeftError
from weft.runtime.checkpoint import inspect
from weft.runtime.process import keep_freed_memory, launch
from weft.train.job import Job, ranks_of, schedule_of
from weft.train.reporting import write_report
from weft.train.run.folder import Folder


def run(job: Job, folder: Folder, *, checkpoint: str = "", max_restarts: int = 0, show: str = "live") -> dict[str, Any]:
    """Train a job to its end in a folder; from a checkpoint (`latest`, …) if one is named. What came out."""
    start, alone = None, job.schedule.virtual or is_rank()
    if alone and max_restarts:
        whose = "torchrun has its own --max-restarts" if is_rank() else "virtual ranks die with this process"
        raise WeftError(f"--max-restarts is for the processes that weft starts; {whose}, so leave it out")
    if checkpoint:
        job, start = _from(job, folder, checkpoint)
    if is_first():
        if not checkpoint:
            folder.write_job(job)
        folder.sweep()
    try:
        summary = _here(job, folder, start, show) if alone else _supervised(job, folder, start, max_restarts, show)
    except WeftError:
        if is_first() and not checkpoint:
            folder.remove_unused()  # a mistake that only ranks could see should not take the name
        raise
    if is_first():
        write_report(folder)
    return summary


def _from(job: Job, folder: Folder, which: str) -> tuple[Job, str | None]:
    """A checkpoint that is whole to the last byte, before any rank is started; and the job, cut where it was.

    Measured times differ from start to start, and under an asynchronous schedule the cut has a part in the result.
    """
    found = folder.find(which)
    if found is None:
        return job, None
    try:
        layers = inspect(found)["extra"]["layers"]
    except (WeftError, KeyError, TypeError) as problem:
        cause = str(problem) if isinstance(problem, WeftError) else f"checkpoint {found} is not of weft train"
        raise WeftError(f"{cause}, such as the one before this: --checkpoint previous") from None
    if job.schedule.balance == "time" and not job.schedule.layers and len(layers) == schedule_of(job).chunks:
        job = replace(job, schedule=replace(job.schedule, layers=layers))
    return job, str(found)


def _here(job: Job, folder: Folder, start: str | None, show: str) -> dict[str, Any]:
    """As the rank that this process is, or with all of them as virtual ones."""
    import torch

    from weft.train.run.loop import train

    if job.schedule.virtual:
        keep_freed_memory()
        torch.set_num_threads(job.train.threads)
        return train(job, str(folder), start, 0, show)
    ranks = ranks_of(job)
    return launch(train, job, str(folder), start, 0, show, ranks=ranks, threads=job.train.threads)[0]


def _supervised(job: Job, folder: Folder, start: str | None, max_restarts: int, show: str) -> dict[str, Any]:
    restarts = 0
    with _stopping(job.checkpoint.grace) as stop:
        while True:
            try:
                arguments = (job, str(folder), start, restarts, show)
                return launch(_train, *arguments, ranks=ranks_of(job), threads=job.train.threads, stop=stop)[0]
            except RunError as problem:
                _show_cursor()
                if problem.mistake is not None:
                    raise WeftError(problem.mistake) from problem
                if (summary := folder.summary()) is not None:  # it died when all was done
                    return summary
                if restarts == max_restarts or stop.is_set():
                    raise
                restarts += 1
                job, start = _from(job, folder, "latest")
                where = "the beginning" if start is None else os.path.basename(start)
                cause = str(problem).splitlines()[0]
                print(f"weft: {cause}; restart {restarts} of {max_restarts}, from {where}", file=sys.stderr, flush=True)
                folder.sweep()


def _train(*arguments: Any) -> dict[str, Any]:
    """What a rank runs; it imports the loop, the process that starts it need not."""
    from weft.train.run.loop import train

    return train(*arguments)


@contextlib.contextmanager
def _stopping(grace: float) -> Iterator[threading.Event]:
    """An event that the first SIGTERM or Ctrl-C sets; the second leaves at once."""
    stop = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        words = (
            f"stopping: what is under way is finished and saved, in {grace:g} s at the most; once more to leave at once"
        )
        os.write(2, f"weft: {words}\n".encode())
        signal.alarm(math.ceil(grace))

    def late(number: int, frame: Any) -> None:
        raise RunError(
            f"the run did not stop within checkpoint.grace ({grace:g} s) and was ended; the last checkpoint stands"
        )

    handlers = {signal.SIGTERM: ask, signal.SIGINT: ask, signal.SIGALRM: late}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_cursor() -> None:
    """A killed rank may have left the terminal without one."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")

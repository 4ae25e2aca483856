"""How a run starts: which command, in which state of the folder, does what. docs/checkpoints.md draws it.

A command makes a `Request`. The process that owns the folder decides by it, before every start of the ranks: the
process of `weft train`, or rank 0 under torchrun. A restart resumes what the command itself has begun; if the ranks
died before they had begun anything, it starts as the first time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.errors import WeftError
from weft.output import warn
from weft.train.job import Job, read_job_of_run, schedule_of
from weft.train.run import Folder, locked, new_folder, slug

CHOICE = "choice.json"  # what a comparison compares


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command asks for.

    new         a new run; its folder must not hold another one
    overwrite   a new run, in place of the one that its folder holds
    continue    resume the run of the job's name, or start it
    resume      resume a run that is there
    """

    mode: Literal["new", "overwrite", "continue", "resume"]
    checkpoint: str = ""  # by which a run resumes; empty: the latest, unless the run is finished
    new_data: bool = False  # its data may differ from the checkpoint's


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the ranks have to do."""

    job: Job
    invocation: str
    checkpoint: str | None = None  # to resume from; None: from the beginning
    overwrite: bool = False  # delete the earlier run, once this one is ready to begin
    new_data: bool = False  # the data may differ from the checkpoint's
    restarts: int = 0
    lock: tuple[int, int] | None = None  # what identifies the lock of the folder

    @property
    def place(self) -> str:
        """Where training begins, in words."""
        return "the beginning" if self.checkpoint is None else Path(self.checkpoint).name


@contextlib.contextmanager
def owned_folder(
    job: Job, request: Request, found: Folder | None = None, *, comparison: bool = False
) -> Iterator[Folder]:
    """The folder of a run or of a comparison, which belongs to this process inside the block.

    `found` is the folder of a run to resume; otherwise the job decides.
    """
    folder = found or (named_folder(job) if job.name else new_folder(job.log.folder, default_name(job)))
    is_new, is_comparison = folder.is_new(), bool(folder.text(CHOICE))
    if not is_new and request.mode != "overwrite" and is_comparison != comparison:
        kind, command = ("a comparison", "compare") if is_comparison else ("a single run", "train")
        raise WeftError(f"{folder} is {kind}; use weft {command} --resume {shlex.quote(str(folder))}")
    folder.create()
    with locked(folder.path) as folder.lock:
        try:
            yield folder
        finally:
            folder.remove_unused()  # a mistake that only ranks notice must not use up the name


def named_folder(job: Job) -> Folder:
    return Folder(os.path.join(job.log.folder, job.name))


def default_name(job: Job) -> str:
    return f"{slug(job.model.name)}-{slug(job.schedule.name)}"


def decide(job: Job, folder: Folder, request: Request, *, invocation: str, restarts: int = 0) -> Start | dict[str, Any]:
    """How to start, or the summary of a run that has nothing left to do."""
    start = _decide(job, folder, request, invocation, restarts)
    if isinstance(start, Start):
        folder.forget_status()
        start = replace(start, new_data=request.new_data, lock=folder.lock)
    return start


def _decide(job: Job, folder: Folder, request: Request, invocation: str, restarts: int) -> Start | dict[str, Any]:
    if folder.begun_by() == invocation:  # a restart
        return folder.results_of(invocation) or _resume(job, folder, folder.chosen(), invocation, restarts)
    if folder.is_new():
        if request.mode == "resume":
            raise WeftError(f"{folder} is not a run: it has no job.toml; name a folder such as runs/gpt-wpipe")
        return Start(job=job, invocation=invocation, restarts=restarts)
    if request.mode == "overwrite":
        return Start(job=job, invocation=invocation, overwrite=True, restarts=restarts)
    if request.mode == "new":
        raise exists_already(folder)
    if not request.checkpoint and (done := _finished(folder, job)) is not None:
        if request.mode == "continue":
            warn(f"{folder} is {done['how']} already, so there is nothing to do; these are its results")
            return done
        raise WeftError(
            f"{folder} is {done['how']} (updates: {done['update']}), so there is nothing to resume; give it "
            "more with --set train.updates=, train.epochs= or evaluate.patience="
        )
    start = _resume(job, folder, request.checkpoint, invocation, restarts)
    if start.checkpoint is None and folder.summary() is not None:
        raise WeftError(
            f"{folder} has results, but no checkpoint in {folder.checkpoints} to resume from; restore them, or begin "
            "again (--overwrite)"
        )
    warn(f"resuming {folder} from {start.place}")
    return start


def exists_already(folder: Folder) -> WeftError:
    return WeftError(
        f"{folder} exists already; resume it (--resume {shlex.quote(str(folder))}), replace it "
        "(--overwrite), or choose another name (--set name=...)"
    )


def _finished(folder: Folder, job: Job) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do: resuming it would only lose its figures."""
    summary = folder.summary()
    if summary is None or summary["how"] == "stopped":
        return None
    before = read_job_of_run(folder.path)
    limits = [(run.train.updates, run.train.epochs, run.evaluate.patience) for run in (before, job)]
    return summary if limits[0] == limits[1] else None


def _resume(job: Job, folder: Folder, which: str, invocation: str, restarts: int) -> Start:
    """From a checkpoint, partitioned as it was; from the beginning if there is none yet.

    Measured times differ from start to start, and under an asynchronous schedule the partition affects the result.
    """
    folder.sweep()
    path = find_checkpoint(folder, which)
    if path is None:
        return Start(job=job, invocation=invocation, restarts=restarts)
    layers = _layers(path)
    if job.schedule.balance == "time" and not job.schedule.layers and len(layers) == schedule_of(job).chunks:
        job = replace(job, schedule=replace(job.schedule, layers=layers))
    return Start(job=job, invocation=invocation, checkpoint=str(path), restarts=restarts)


def find_checkpoint(folder: Folder, which: str) -> Path | None:
    """A checkpoint that is verified to the last byte; None if there is no latest one yet.

    A name is taken as it is. `latest`, or none, is the newest that is valid: if that is another one than the file
    `latest` names, a warning says so.
    """
    if which not in ("", "latest"):
        path = folder.find(which)
        assert path is not None
        _layers(path)
        return path
    problems = []
    if (name := folder.dangling()) is not None:
        problems.append(f"{folder.checkpoints / 'latest'} names {name!r}, which is not a checkpoint of {folder}")
    for path in folder.newest():
        try:
            _layers(path)
        except WeftError as problem:
            problems.append(str(problem).removesuffix("; use another checkpoint"))
            continue
        for text in problems:
            warn(f"{text}; using {path.name}, the newest valid checkpoint")
        return path
    if problems:
        raise WeftError(
            f"{folder} has no valid checkpoint ({'; '.join(problems)}); begin the run again (weft train --overwrite)"
        )
    return None


def _layers(path: Path) -> list[int]:
    """Verify a checkpoint; the layers of its chunks."""
    from weft.runtime.checkpoint import inspect

    try:
        layers: list[int] = inspect(path)["extra"]["layers"]
    except (KeyError, TypeError):
        raise WeftError(f"checkpoint {path} is not of weft train; use another one") from None
    return layers

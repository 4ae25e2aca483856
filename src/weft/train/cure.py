"""The cure that a job names, and a check of what training adds to a schedule, before a rank starts."""

from __future__ import annotations

from collections.abc import Callable

from weft.runtime import cures
from weft.runtime.update import Cure, cure_for
from weft.runtime.weights import check_clip_norm
from weft.schedule import lower
from weft.train.job import Job, schedule_of


def cure_of(job: Job) -> Cure | None:
    makers: dict[str, Callable[[], Cure | None]] = {
        "none": lambda: None,
        "pipemare": lambda: cures.PipeMare(anneal=job.schedule.anneal),
        "gapaware": cures.GapAware,
    }
    return makers[job.schedule.cure]()


def check_training(job: Job) -> None:
    """Refuse a cure or clipping that does not work with the schedule."""
    program = lower(schedule_of(job))
    if job.train.clip_norm:
        check_clip_norm(program)
    cure_for(cure_of(job), program)

"""The cure that a job names, and its check before a rank starts."""

from __future__ import annotations

from collections.abc import Callable

from weft.runtime import cures
from weft.runtime.update import Cure, cure_for
from weft.schedule import lower
from weft.train.job import Job, cure_name, schedule_of


def cure_of(job: Job) -> Cure | None:
    choice = job.schedule
    makers: dict[str, Callable[[], Cure | None]] = {
        "none": lambda: None,
        "optimistic": lambda: cures.Optimistic(c=choice.c or "stale", chunks=choice.cured),  # type: ignore[arg-type]
        "pipemare": lambda: cures.PipeMare(anneal=choice.anneal),
        "gapaware": cures.GapAware,
    }
    return makers[cure_name(job)]()


def check_cure(job: Job) -> None:
    """Refuse a cure that does not work with the schedule."""
    cure_for(cure_of(job), lower(schedule_of(job)))

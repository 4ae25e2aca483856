"""Schedules by the names that tables of tests use: those of the methods, and one for wpipe with fresh reads."""

from collections.abc import Mapping

import weft
from weft.schedule import METHODS

FRESH = "wpipe-fresh"
NAMES = [*METHODS, FRESH]
PREDICTING = ("xpipe", "spectrain", "pipeoptim")  # always
OTHER_BACKWARD = ("paci", *PREDICTING)  # backwards read other weights than their forwards


def schedule_for(
    name: str, *, stages: int, microbatches: int, predict: Mapping[str, str] | None = None
) -> str | weft.Schedule:
    """What a pipeline with `predict=` takes as the schedule of this name."""
    if name != FRESH:
        return name
    options = {} if predict is None else {"predict": predict.get("versions", "published")}
    return weft.schedule("wpipe", stages=stages, microbatches=microbatches, fresh=True, **options)

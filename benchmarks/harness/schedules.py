"""Schedules by a name with options: `wpipe warmup 2`, `xpipe versions exact`. Imports no torch."""

from __future__ import annotations

import re

from weft.errors import WeftError
from weft.schedule import METHODS, Schedule, schedule


def schedule_named(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of a name with options; WeftError if it can't have these sizes."""
    method, *words = name.split()
    if len(words) % 2:
        raise WeftError(f"options of a schedule are pairs of a name and a value, as in wpipe warmup 2 (got {name!r})")
    options = {key: _value(text) for key, text in zip(words[::2], words[1::2], strict=True)}
    return schedule(method, stages=stages, microbatches=microbatches, **options)


def fits(name: str, stages: int, microbatches: int) -> bool:
    """Whether the schedule can have these sizes."""
    method, *_ = name.split()
    if method not in METHODS:
        raise WeftError(f"there is no schedule {method!r}; known are {', '.join(METHODS)}")
    try:
        schedule_named(name, stages, microbatches)
    except WeftError:
        return False
    return True


def title_of(name: str) -> str:
    """`wpipe fresh True` as `wpipe fresh`, `weave split False` as `weave no split`."""
    return re.sub(r"(\w+) False\b", r"no \1", name).replace(" True", "")


def _value(text: str) -> int | bool | str:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text

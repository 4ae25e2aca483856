"""A schedule that a function of the user builds: `package.module:function` or `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import user_code
from weft.errors import WeftError
from weft.schedule.core import Schedule


def load_schedule_function(name: str) -> Callable[..., Schedule]:
    """The function with this name; its exceptions and wrong return types become a WeftError."""
    function = user_code.load(name)

    def build(**arguments: Any) -> Schedule:
        schedule = function(**arguments)
        if not isinstance(schedule, Schedule):
            raise WeftError(f"{name} must return a weft.Schedule (got {type(schedule).__name__})")
        return schedule

    return build

"""A user's own schedule by name: `package.module:function` or `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import user_code
from weft.errors import WeftError
from weft.schedule.core import Schedule


def load_schedule_function(name: str) -> Callable[..., Schedule]:
    """The function behind a name; what it raises or returns wrongly becomes a clear error."""
    function = user_code.load(name)

    def build(**arguments: Any) -> Schedule:
        schedule = function(**arguments)
        if not isinstance(schedule, Schedule):
            raise WeftError(f"{name} must return a weft.Schedule (got {type(schedule).__name__})")
        return schedule

    return build

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
        for option in arguments.keys() - {"stages", "microbatches"}:
            if not _takes(function, option):
                raise WeftError(f"{name} takes no {option}; leave it out")
        schedule = function(**arguments)
        if not isinstance(schedule, Schedule):
            raise WeftError(f"{name} must return a weft.Schedule (got {type(schedule).__name__})")
        return schedule

    return build


def _takes(function: Callable[..., Any], option: str) -> bool:
    signature = user_code.signature_of(function)
    if signature is None:  # the call will show it
        return True
    parameters = signature.parameters
    return option in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

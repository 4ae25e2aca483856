"""weft: asynchronous pipeline-parallel training for PyTorch.

`weft.schedule(...)` and `weft.simulate(...)` are functions that share their names with the packages they come
from; whatever else those packages hold is imported as `from weft.schedule import F`. What needs torch is
imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from weft.errors import PeerError, RunError, ScheduleError, StorageError, WeftError
from weft.schedule import Schedule, Weights, load_csv, schedule, verify
from weft.simulate import ChunkCost, Cost, Link, simulate, timeline
from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.runtime import Pipeline, Report, Result, cures, cut, launch, linear_rule, materialize, on_meta, optimizers


__all__ = [
    "ChunkCost",
    "Cost",
    "Link",
    "PeerError",
    "Pipeline",
    "Report",
    "Result",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StorageError",
    "WeftError",
    "Weights",
    "cures",
    "cut",
    "launch",
    "linear_rule",
    "load_csv",
    "materialize",
    "on_meta",
    "optimizers",
    "schedule",
    "simulate",
    "timeline",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # the others are imported above
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from weft import runtime

    return getattr(runtime, name)


def __dir__() -> list[str]:
    return __all__

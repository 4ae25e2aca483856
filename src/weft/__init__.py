"""weft: asynchronous pipeline-parallel training for PyTorch.

`weft.schedule(...)` and `weft.simulate(...)` are functions that share their names with the packages they come
from; whatever else those packages hold is imported as `from weft.schedule import F`.
"""

from weft.errors import ScheduleError, WeftError
from weft.schedule import Schedule, Weights, load_csv, schedule, verify
from weft.simulate import ChunkCost, Cost, Link, simulate, timeline

__version__ = "0.1.0"

__all__ = [
    "ChunkCost",
    "Cost",
    "Link",
    "Schedule",
    "ScheduleError",
    "WeftError",
    "Weights",
    "load_csv",
    "schedule",
    "simulate",
    "timeline",
    "verify",
]

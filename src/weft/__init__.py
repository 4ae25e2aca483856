"""weft: asynchronous pipeline-parallel training for PyTorch.

`weft.schedule(...)` and `weft.simulate(...)` are functions that share their names with the packages they come
from; whatever else those packages hold is imported as `from weft.schedule import F`.
"""

from weft.errors import ScheduleError, WeftError
from weft.schedule import Schedule, Weights, schedule, verify
from weft.simulate import Cost, simulate

__version__ = "0.1.0"

__all__ = ["Cost", "Schedule", "ScheduleError", "WeftError", "Weights", "schedule", "simulate", "verify"]

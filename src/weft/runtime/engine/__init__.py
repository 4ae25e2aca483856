"""Executing actions: the worker of a rank and what drives it, its chunks and their passes, meters and memory.

It knows actions, not methods: which weights a pass reads stands in the lowered schedule.
"""

from weft.runtime.engine.chunk import Chunk, ComputeSettings, LossFunction
from weft.runtime.engine.driver import Blocking, Driver, TurnTaking, Work
from weft.runtime.engine.evaluation import Outputs, Scores, evaluate
from weft.runtime.engine.feeding import feed
from weft.runtime.engine.randomness import Seeds
from weft.runtime.engine.worker import Completed, Worker

__all__ = [
    "Blocking",
    "Chunk",
    "Completed",
    "ComputeSettings",
    "Driver",
    "LossFunction",
    "Outputs",
    "Scores",
    "Seeds",
    "TurnTaking",
    "Work",
    "Worker",
    "evaluate",
    "feed",
]

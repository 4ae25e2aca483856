"""Execute actions: the worker of a rank and its driver, chunks and their passes, meters and memory.

This room knows actions, not methods: the lowered schedule says which weights a pass reads.
"""

from weft.runtime.engine.chunk import Chunk, ComputeSettings, LossFunction
from weft.runtime.engine.completions import Completed
from weft.runtime.engine.driver import Blocking, Driver, TurnTaking, Work
from weft.runtime.engine.evaluation import Outputs, Scores, evaluate
from weft.runtime.engine.feeding import feed
from weft.runtime.engine.precision import PRECISIONS, Precision
from weft.runtime.engine.randomness import Seeds
from weft.runtime.engine.split_backward import SplitBackward
from weft.runtime.engine.worker import Worker

__all__ = [
    "PRECISIONS",
    "Blocking",
    "Chunk",
    "Completed",
    "ComputeSettings",
    "Driver",
    "LossFunction",
    "Outputs",
    "Precision",
    "Scores",
    "Seeds",
    "SplitBackward",
    "TurnTaking",
    "Work",
    "Worker",
    "evaluate",
    "feed",
]

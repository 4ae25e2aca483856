"""Executing actions: the worker of a rank, its chunks, passes, meters."""

from weft.runtime.engine.chunk import Chunk, How, LossFunction
from weft.runtime.engine.randomness import Seeds
from weft.runtime.engine.worker import Completed, Waits, Worker

__all__ = ["Chunk", "Completed", "How", "LossFunction", "Seeds", "Wait", "Waits", "Worker"]

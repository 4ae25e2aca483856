"""The simulator: a schedule and its costs give time, memory, delay, slack and traffic. Torch-free.

`simulate` returns the steady figures, `timeline` every start and end of a window of mini-batches.
"""

from weft.simulate.cost import ChunkCost, Cost, Link, action_durations
from weft.simulate.memory import CATEGORIES, RankMemory
from weft.simulate.simulation import Simulation, simulate, timeline
from weft.simulate.slack import Slack, slack

__all__ = [
    "CATEGORIES",
    "ChunkCost",
    "Cost",
    "Link",
    "RankMemory",
    "Simulation",
    "Slack",
    "action_durations",
    "simulate",
    "slack",
    "timeline",
]

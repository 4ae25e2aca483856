"""Schedule + costs -> time, memory, delay and traffic: torch-free."""

from weft.simulate.cost import ChunkCost, Cost, Link, action_durations
from weft.simulate.memory import CATEGORIES, RankMemory
from weft.simulate.simulation import Simulation, simulate, timeline

__all__ = [
    "CATEGORIES",
    "ChunkCost",
    "Cost",
    "Link",
    "RankMemory",
    "Simulation",
    "action_durations",
    "simulate",
    "timeline",
]

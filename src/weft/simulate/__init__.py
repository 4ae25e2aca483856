"""Schedule + costs -> time, memory, delay and traffic: torch-free."""

from weft.simulate.cost import ChunkCost, Cost, Link
from weft.simulate.memory import CATEGORIES, RankMemory
from weft.simulate.simulation import Block, Simulation, Timeline, simulate, timeline

__all__ = [
    "CATEGORIES",
    "Block",
    "ChunkCost",
    "Cost",
    "Link",
    "RankMemory",
    "Simulation",
    "Timeline",
    "simulate",
    "timeline",
]

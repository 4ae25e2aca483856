"""Figures that training and reports share: which direction of a metric is better, and the parts of a resident set.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOWER_IS_BETTER = ("loss", "perplexity")

RESIDENT_PARTS = {
    "process": "empty process",  # interpreter and libraries, and what the user's code holds besides the model
    "counted": "counted",  # by the meters of its ranks
    "messages": "shared messages",  # memory that other ranks map, too
    "rest": "rest",  # temporaries, and what the allocator keeps
}  # of the peak of a process
SHARED_PROCESS = "virtual ranks share one process"


def higher_is_better(metric: str) -> bool:
    return metric not in LOWER_IS_BETTER


def resident_sets(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, int]]:
    """The resident set of each process, from the figures of its ranks; virtual ranks share one."""
    sets: dict[str, Mapping[str, int]] = {}
    place = 0
    while place < len(ranks) and (found := ranks[place].get("resident")):
        last = place + found["ranks"] - 1
        sets[f"rank {place}" if last == place else f"ranks {place}–{last}"] = found
        place = last + 1
    return sets

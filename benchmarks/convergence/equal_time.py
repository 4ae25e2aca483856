"""How long an update takes under each schedule, simulated: what methods reach in the same time follows from that.

A mini-batch has the same samples under every schedule, so more micro-batches are smaller ones. A forward takes 1 and
each half of a backward 1, for all micro-batches together; a hop takes a share of a forward of one micro-batch.
"""

from __future__ import annotations

from typing import Any

from weft.schedule import schedule
from weft.simulate import Cost, Link, simulate

STAGES, TURNS, HOPS = (4, 8), (1, 2, 4, 8), (0.0, 0.1)
OPPONENTS = ("1f1b", "zb-h1")  # synchronous
CONTENDERS: dict[int, dict[str, str]] = {  # turns -> the method of the study -> its schedule
    1: {"wpipe": "wpipe"},
    **{turns: {f"wpipe fresh, m = {turns}p": "wpipe", f"weave, m = {turns}p": "weave"} for turns in TURNS[1:]},
}


def periods() -> list[dict[str, Any]]:
    """The time of an update; 3 is that of a pipeline without a bubble and without hops."""
    found = []
    for stages in STAGES:
        for turns in TURNS:
            names = [*OPPONENTS, *CONTENDERS[turns].values()]
            for hop in HOPS:
                by_name = {name: _period(name, stages, turns * stages, hop) for name in names}
                found.append({"stages": stages, "turns": turns, "hop": hop, "periods": by_name})
    return found


def _period(name: str, stages: int, microbatches: int, hop: float) -> float:
    built = schedule(name, stages=stages, microbatches=microbatches)
    cost = Cost.uniform(built, forward=1.0, backward=2.0, link=Link(latency=hop))
    return simulate(built, cost).period / microbatches

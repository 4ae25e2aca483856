"""What methods reach in the same time: fewer updates for synchronous training, and how soon its loss is reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.convergence.methods import BASE, EVERY, OPTIMISTIC, RANKS
from benchmarks.convergence.plan import TUNING_SEED, Settings
from benchmarks.convergence.verdicts import Cell, Gap, gap_between, settings_of
from benchmarks.harness import Results

OF_WEFT, TORCH = ("1f1b", "zb-h1"), "torch's best"
OPPONENTS = (*OF_WEFT, TORCH)
CONTENDERS: dict[int, dict[str, str]] = {  # turns -> the method of the study -> its schedule
    1: {"wpipe": "wpipe", "pipedream, m = p": "pipedream"},
    **{turns: {f"wpipe fresh, m = {turns}p": "wpipe", f"weave, m = {turns}p": "weave"} for turns in (2, 4, 8)},
}

Points = dict[int, list[tuple[float, float]]]  # by seed: shares of the updates of a study, and what they reach


@dataclass(frozen=True, kw_only=True)
class Race:
    """A method against synchronous schedules of the same sizes."""

    cell: Cell
    stages: int
    turns: int
    costs: str
    gaps: dict[str, Gap]  # by opponent: to what that reaches in the time of the method
    time: tuple[float, ...]  # to the final loss of `1f1b`, in shares of its time, by seed; empty if not known

    @property
    def where(self) -> str:
        return f"{self.cell.study}, p = {self.stages}, m = {self.turns * self.stages}, {self.costs}"


def races(results: Results, found: Sequence[Cell]) -> Iterator[Race]:
    """Of all cells whose synchronous training has runs of several lengths."""
    for case in results["periods"]:
        for cell in found:
            name = CONTENDERS.get(case["turns"], {}).get(cell.method)
            if name not in case["periods"] or (name != "wpipe" and case["stages"] != RANKS):  # delays depend on p
                continue
            if cell.correction != OPTIMISTIC:  # the better one for synchronous training, too
                continue
            base = points_of(results, cell.study, BASE, cell.correction)
            shares = {opponent: case["periods"][name] / case["periods"][opponent] for opponent in OPPONENTS}
            gaps = {opponent: gap_between(cell.losses, at_share(base, share)) for opponent, share in shares.items()}
            if known := {opponent: gap for opponent, gap in gaps.items() if gap is not None}:
                own = points_of(results, cell.study, cell.method, cell.correction)
                time = tuple(share * shares[BASE] for share in shares_to(own, base))
                yield Race(
                    cell=cell, stages=case["stages"], turns=case["turns"], costs=case["costs"], gaps=known, time=time
                )


def points_of(results: Results, study: str, method: str, correction: str) -> Points:
    """Of seeds with runs of several lengths, at the best settings."""
    updates, points = results["studies"][study]["updates"], Points()
    best = settings_of(results, study)[EVERY[method].profile, correction]
    for run in results["runs"]:
        place = (run["study"], run["method"], run["correction"])
        if place != (study, method, correction) or run["seed"] == TUNING_SEED or run["loss"] is None:
            continue
        if Settings(**run["settings"]) == best:
            points.setdefault(run["seed"], []).append((run["updates"] / updates, run["loss"]))
    return {seed: sorted(found) for seed, found in points.items() if len(found) > 1}


def at_share(points: Points, share: float) -> dict[int, float]:
    """What is reached in a share of the updates, by seed: linear between the lengths that ran.

    A share below the shortest run counts as that, which favours synchronous training; above the longest it is unknown.
    """
    return {seed: _between(found, share) for seed, found in points.items() if share <= found[-1][0]}


def shares_to(points: Points, base: Points) -> list[float]:
    """The share of the updates after which the final loss of `base` is reached, by seed; infinite if it never is."""
    wanted = at_share(base, 1.0)
    return [_first(points[seed], wanted[seed]) for seed in sorted(points.keys() & wanted.keys())]


def _between(points: Sequence[tuple[float, float]], share: float) -> float:
    if share <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if share <= high:
            return first + (second - first) * (share - low) / (high - low)
    raise AssertionError(f"no run is as long as {share}")


def _first(points: Sequence[tuple[float, float]], loss: float) -> float:
    if points[0][1] <= loss:
        return points[0][0]
    for (low, before), (high, after) in pairwise(points):
        if after <= loss:
            return low + (high - low) * (before - loss) / (before - after)
    return float("inf")

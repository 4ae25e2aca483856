"""The search for the building block of `weave`: the fewest micro-batches in flight that give a slack.

Split backwards: equal distances from hop to hop, found by enumeration. Whole backwards: no equal distances below 3
fit on six ranks or more, so each hop has its own, found as the shortest path over the arrangements of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, permutations, product
from typing import TypeAlias

from weft.schedule.building_block import PERIOD, BuildingBlock, peak_of

DEFAULT_SLACK = 0.5  # forwards of a stage

Arrangement: TypeAlias = "tuple[int, ...]"  # units of the four passes on a rank, modulo the period

ARRANGEMENTS: list[Arrangement] = [
    units
    for units in permutations(range(PERIOD), 4)
    if len({*units, (units[2] + 1) % PERIOD, (units[3] + 1) % PERIOD}) == PERIOD
]  # of whole backwards, which take two units each


@lru_cache(maxsize=256)
def find_block(stages: int, slack: float, split: bool) -> BuildingBlock:
    """The block with at least this slack that holds the fewest micro-batches: on the fullest rank, then in total.

    Among those, the least stale one, and the shortest.
    """
    extra = math.ceil(4 * slack)  # units of slack that a hop down and a hop up need together
    return min((_with_equal_distances if split else _shortest_paths)(stages, extra), key=_score)


def _score(block: BuildingBlock) -> tuple[int, ...]:
    chunks = [block.chunks(rank) for rank in range(block.stages)]
    peaks = [peak_of(pair) for pair in chunks]
    in_flight = sum(chunk.in_flight for pair in chunks for chunk in pair)
    return max(peaks), sum(peaks), in_flight, *block.passes[0]


def _with_equal_distances(stages: int, extra: int) -> Iterator[BuildingBlock]:
    """Blocks with split backwards; those that must hold more than the best so far are left out.

    A micro-batch is in flight, in both chunks together, for at least `(a + b + c + d)(p - 1)` units on the first
    rank and `2 (b + c)(p - 1)` on the last one, and 8 units more for its gaps and W.
    """
    hops = stages - 1
    choices = []
    for a, b, c, d in product(range(max(1, extra // 2), extra // 2 + 5) if hops else [1], repeat=4):
        if not hops or min(a, c) + min(b, d) >= extra + 2:
            units = hops * (b + c + max(a + d, b + c)) + 8
            choices.append((-(-units // PERIOD), max(a, b, c, d), (a, b, c, d)))
    fewest = math.inf
    for least, _, distances in sorted(choices):
        if least > fewest:
            return
        for gaps in product(range(1, PERIOD + 1), repeat=3):
            if _fit(stages, distances, gaps):
                block = BuildingBlock.of([[distance] * hops for distance in distances], gaps, split=True)
                fewest = min(fewest, max(map(block.peak, range(stages))))
                yield block


def _fit(stages: int, distances: tuple[int, ...], gaps: tuple[int, ...]) -> bool:
    """`BuildingBlock.fits` for equal distances. The ranks repeat modulo the period, so a few of them are enough."""
    a, b, c, d = distances
    up = (a + b) * (stages - 1) + gaps[0]
    backward_down = up + gaps[1]
    backward_up = backward_down + (c + d) * (stages - 1) + gaps[2]
    for rank in range(min(stages, PERIOD)):
        starts = (a * rank, up - b * rank, backward_down + c * rank, backward_up - d * rank)
        if len({start % PERIOD for start in starts}) < 4:
            return False
    return True


def _shortest_paths(stages: int, extra: int) -> Iterator[BuildingBlock]:
    """Blocks with whole backwards: for each arrangement of the last rank, the one with the shortest times in flight.

    The weights of a hop's distances say in how many chunks they lengthen the time between forward and backward.
    """
    for of_down in {extra // 2, extra - extra // 2}:
        hops = {
            (above, below): _least_distances(above, below, of_down, extra - of_down)
            for above, below in product(ARRANGEMENTS, repeat=2)
        }
        paths: dict[Arrangement, tuple[int, tuple[Arrangement, ...]]] = {
            first: (2 * stages * _gap(first[1], first[2], 1), (first,)) for first in ARRANGEMENTS
        }
        for hop in range(stages - 1):
            few, many = hop + 1, 2 * stages - 1 - hop
            paths = {
                below: min(
                    (cost + few * (a + d) + many * (b + c), (*path, below))
                    for above, (cost, path) in paths.items()
                    for a, b, c, d in [hops[above, below]]
                )
                for below in ARRANGEMENTS
            }
        for _, path in paths.values():
            first, last = path[0], path[-1]
            gaps = (_gap(last[0], last[1], 1), _gap(first[1], first[2], 1), _gap(last[2], last[3], 2))
            distances = [hops[hop] for hop in pairwise(path)]
            yield BuildingBlock.of([[hop[n] for hop in distances] for n in range(4)], gaps, split=False)


def _least_distances(above: Arrangement, below: Arrangement, of_down: int, of_up: int) -> tuple[int, int, int, int]:
    """The least distances of a hop between ranks with these arrangements, with this slack down and up."""
    return (
        _gap(above[0], below[0], 1 + of_down),
        _gap(below[1], above[1], 1 + of_up),
        _gap(above[2], below[2], 2 + of_down),
        _gap(below[3], above[3], 2 + of_up),
    )


def _gap(start: int, end: int, least: int) -> int:
    """The time from one unit modulo the period to another, if it takes at least so many."""
    return least + (end - start - least) % PERIOD

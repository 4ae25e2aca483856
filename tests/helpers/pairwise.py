"""A few rows of a large table that still contain every pair of values.

Mistakes that need three particular values at once are rare; the whole table is for `make test-all`.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row")


def pairwise(table: Sequence[Row], values: Callable[[Row], Sequence[Hashable]]) -> list[Row]:
    """Rows, in order, that contain each pair of values of any row of the table.

    Greedy: each time the first row with the most pairs that are still missing.
    """
    pairs = [{pair for count in (1, 2) for pair in combinations(enumerate(values(row)), count)} for row in table]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(table)), key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [table[row] for row in sorted(chosen)]

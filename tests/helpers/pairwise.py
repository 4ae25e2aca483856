"""A few rows of a large table that still contain every pair of values.

Mistakes that need three particular values at once are rare; the other rows are marked slow, for `make test-all`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


def parametrize_rows(
    name: str, table: Sequence[Row], values: Callable[[Row], Sequence[Hashable]]
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize(name, table)`, with the rows beyond a cover of all pairs marked slow."""
    cover = pairwise(table, values)
    rows = [pytest.param(row, marks=[] if row in cover else pytest.mark.slow) for row in table]
    return pytest.mark.parametrize(name, rows, ids=str)


def parametrize_product(**columns: Iterable[Any]) -> pytest.MarkDecorator:
    """As one `pytest.mark.parametrize` for each column, with the rows beyond a cover of all pairs marked slow."""
    values = {name: list(column) for name, column in columns.items()}
    table = list(product(*(range(len(column)) for column in values.values())))
    cover = pairwise(table, lambda row: row)
    rows = [
        pytest.param(
            *(column[i] for column, i in zip(values.values(), row, strict=True)),
            marks=[] if row in cover else pytest.mark.slow,
        )
        for row in table
    ]
    return pytest.mark.parametrize(tuple(columns), rows)


def pairwise(table: Sequence[Row], values: Callable[[Row], Sequence[Hashable]]) -> list[Row]:
    """Rows, in order, that contain each pair of values of any row of the table.

    Greedy: each time the first row with the most pairs that are still missing.
    """
    bits: dict[Hashable, int] = {}  # of each pair, in a number for a row: sets would take seconds
    pairs = [0] * len(table)
    for place, row in enumerate(table):
        for count in (1, 2):
            for pair in combinations(enumerate(values(row)), count):
                pairs[place] |= bits.setdefault(pair, 1 << len(bits))
    missing = (1 << len(bits)) - 1
    chosen: set[int] = set()
    while missing:
        best = max(range(len(table)), key=lambda place: (pairs[place] & missing).bit_count())
        chosen.add(best)
        missing &= ~pairs[best]
    return [table[place] for place in sorted(chosen)]

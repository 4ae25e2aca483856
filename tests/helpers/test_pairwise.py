"""The cover that the law tests rest on."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from tests.helpers.pairwise import pairwise, parametrize_product


def pairs(rows: Sequence[tuple[int, ...]]) -> set[object]:
    """And single values, which is what a table of one column has."""
    return {pair for row in rows for count in (1, 2) for pair in combinations(enumerate(row), count)}


@pytest.mark.parametrize("sizes", [(7, 6, 3, 4, 2), (2, 2), (5,), (3, 3, 3, 3), (1, 4, 1)])
def test_every_pair_of_values_occurs(sizes: tuple[int, ...]) -> None:
    table = list(product(*map(range, sizes)))
    chosen = pairwise(table, lambda row: row)
    assert pairs(chosen) == pairs(table)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(table)


def test_few_rows_are_enough() -> None:
    """There have to be as many as the two largest factors have pairs."""
    chosen = pairwise(list(product(range(7), range(6), range(3), range(4), range(2))), lambda row: row)
    assert 7 * 6 <= len(chosen) <= 7 * 6 + 6


def test_pairs_that_the_table_has_not_are_not_asked_for() -> None:
    table = [row for row in product(range(4), range(4), range(2)) if row[0] + row[1] < 4]
    chosen = pairwise(table, lambda row: row)
    assert pairs(chosen) == pairs(table)
    assert len(chosen) < len(table)


def test_the_other_rows_are_marked_slow() -> None:
    columns: list[list[Any]] = [["1f1b", "2bw", "wpipe"], ["mlp", "conv"], [{}, {"replicas": 2}]]
    names, rows = parametrize_product(method=columns[0], model=columns[1], options=columns[2]).mark.args
    assert names == ("method", "model", "options")
    assert [row.values for row in rows] == list(product(*columns))
    fast = [tuple(map(str, row.values)) for row in rows if not row.marks]
    assert len(fast) == 6
    for i, j in combinations(range(3), 2):
        assert len({(row[i], row[j]) for row in fast}) == len(columns[i]) * len(columns[j])

"""What pages are made of: tables between marks, and medians with their spread."""

import pytest

from benchmarks.rendering import (
    END,
    median_and_quartiles,
    median_and_range,
    put_table,
    quartiles,
    table,
    table_mark,
    unsteady,
    verdict,
)
from weft.errors import WeftError


def test_tables() -> None:
    assert table(("a", "b"), [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_table_replaces_what_is_between_its_marks() -> None:
    page = f"before\n{table_mark('x')}\nold\n{END}\n{table_mark('y')}\n{END}\nafter\n"
    assert put_table(page, "x", "new") == page.replace("old", "new")
    for damaged in ("a page", table_mark("x")):
        with pytest.raises(WeftError, match="no place for the table x"):
            put_table(damaged, "x", "text")


def test_spreads() -> None:
    assert median_and_range([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert unsteady([1.0, 2.0, 3.0], 0.5) is False
    assert unsteady([1.0, 2.0, 9.0], 0.5) is True


def test_medians_have_no_minus_before_a_zero() -> None:
    assert median_and_quartiles([-0.004, 0.1, 0.3]) == "0.10 (0.05 to 0.20)"
    assert median_and_quartiles([-0.001]) == "0.00 (0.00 to 0.00)"
    assert median_and_quartiles([1.2345], 3) == "1.234 (1.234 to 1.234)"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.01, 1.02], "met"),
        ([0.5, 1.0, 1.0, 1.0, 1.0], "met"),
        ([0.96, 0.99, 1.02, 1.03], "can't tell"),
        ([0.97, 0.98, 0.99], "missed"),
        ([0.8, 1.0, 1.2], "unsteady"),
        ([1.2, 1.5, 1.8], "unsteady"),  # whatever the target is
    ],
)
def test_verdicts_follow_from_quartiles(values: list[float], expected: str) -> None:
    assert verdict(values, 1.0) == expected
    assert verdict([1 / value for value in values], 1.0, at_most=True) == expected

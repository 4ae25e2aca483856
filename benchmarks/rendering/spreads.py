"""Medians with their spread, and what the rounds of a measurement say of a target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WIDE = 0.15  # an interquartile range above this share of the median is unsteady


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def rounded_quartiles(values: Sequence[float], digits: int = 2) -> tuple[float, float, float]:
    """The quartiles as they are printed, without a minus before a zero."""
    low, median, high = (round(value, digits) + 0.0 for value in quartiles(values))
    return low, median, high


def median_and_quartiles(values: Sequence[float], digits: int = 2) -> str:
    """The median, the first and the third quartile."""
    low, median, high = rounded_quartiles(values, digits)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def unsteady(values: Sequence[float], bound: float = WIDE) -> bool:
    """Whether the interquartile range is wider than `bound` times the median: too wide for a verdict."""
    low, median, high = quartiles(values)
    return high - low > bound * median


def verdict(values: Sequence[float], target: float, *, at_most: bool = False) -> str:
    """What the rounds say of a target: "met" only if both quartiles reach it."""
    if unsteady(values):
        return "unsteady"
    low, _, high = quartiles(values)
    met, missed = (high <= target, low > target) if at_most else (low >= target, high < target)
    return "met" if met else "missed" if missed else "can't tell"

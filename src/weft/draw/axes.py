"""The scale of an axis: which values it spans, where they lie, and which of them are written.

As many values are written as fit without touching each other. A logarithmic axis shows powers of ten; 1, 2 and 5 of
each power where it spans few of them; and any round numbers where it spans less than that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weft.draw.report.charts import labels, ticks
from weft.draw.sheet import measure
from weft.text import format_number

TICK = 12.0  # font size of what is written along an axis
GAP = 12.0  # between two of these, at least

_ZERO = 0.35  # an axis starts at zero if it would start below this share of its end


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def across(self, length: float) -> list[tuple[float, str]]:
        """Values with their texts, written beside each other within that length."""

        def room(places: Sequence[float], texts: Sequence[str]) -> bool:
            halves = [measure(text, TICK) / 2 for text in texts]
            spaced = zip(itertools.pairwise(places), itertools.pairwise(halves), strict=True)
            return all((b - a) * length >= one + other + GAP for (a, b), (one, other) in spaced)

        return self._fitting(room)

    def upward(self, length: float) -> list[tuple[float, str]]:
        """Values with their texts, written above each other."""
        return self._fitting(lambda places, _: all((b - a) * length >= 22 for a, b in itertools.pairwise(places)))

    def _fitting(self, room: Callable[[Sequence[float], Sequence[str]], bool]) -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        for values in self._choices():
            texts = _texts(values, self.log)
            if room([self.share(value) for value in values], texts):
                return list(zip(values, texts, strict=True))
            found = found or list(zip(values[:1], texts[:1], strict=True))
        return found

    def _choices(self) -> Iterable[list[float]]:
        """Sets of values that could be written, the best ones first."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**at for at in range(first, last + 1)]
            steps = [[float(f"{one}e{at}") for at in range(first, last + 1) for one in (1, 2, 5)], powers]
            steps += [[power for at, power in enumerate(powers) if not (first + at) % step] for step in (2, 3, 5, 10)]
            kept = [[value for value in some if self._holds(value)] for some in steps]
            if math.log10(self.high / self.low) >= 2.5:
                kept.pop(0)
            yield from (some for some in kept if len(some) > 1)
        for about in (5, 4, 3, 2, 1):
            if values := ticks(self.low, self.high, about):
                yield values

    def _holds(self, value: float) -> bool:
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)


def rounded(values: Iterable[float], *, log: bool = False) -> Scale:
    """A scale for all of these, of which a linear one ends on round numbers."""
    low, high = _ends(values)
    if log:
        return Scale(low / 2, high * 2, log=True) if low == high else Scale(low, high, log=True)
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    low, high = _from_zero(low, high)
    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return Scale(step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9))


def exact(values: Iterable[float], *, log: bool = False) -> Scale:
    """A scale that ends where these do, or at zero if that is near."""
    low, high = _ends(values)
    if low == high:
        return rounded((low,), log=log)
    return Scale(low, high, log=True) if log else Scale(*_from_zero(low, high))


def shared(scales: Sequence[Scale], share: float = 0.25) -> list[Scale]:
    """One scale for all panels, or each its own, if one of them would use less than that share of the common one."""
    log = scales[0].log
    common = Scale(min(scale.low for scale in scales), max(scale.high for scale in scales), log)
    used = (common.share(scale.high) - common.share(scale.low) for scale in scales)
    return list(scales) if min(used) < share else [common] * len(scales)


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _from_zero(low: float, high: float) -> tuple[float, float]:
    if 0 < low < _ZERO * high:
        return 0.0, high
    return (low, 0.0) if 0 > high > _ZERO * low else (low, high)


def _texts(values: Sequence[float], log: bool) -> list[str]:
    texts = [labels([value])[0] for value in values] if log else labels(values)
    return texts if len(set(texts)) == len(values) else [format_number(value) for value in values]

"""The largest batch that fits, by doubling, then by halving the gap down to an eighth of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Known = dict[int, bool]  # samples -> whether they fit

FINEST = 8  # parts of the gap between the last power of two that fits and the first that does not


@dataclass(kw_only=True)
class Search:
    """The batches tried so far; all are multiples of `step`."""

    step: int
    known: Known = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0 if none does."""
        return max((samples for samples, fits in self.known.items() if fits), default=0)

    def next(self) -> int | None:
        """The next batch to try; None when the largest is known."""
        refused = min((samples for samples, fits in self.known.items() if not fits), default=0)
        if not refused:
            return 2 * self.largest or self.step
        if not self.largest:
            return None
        power = self.step
        while 2 * power <= self.largest:
            power *= 2
        unit = max(self.step, power // FINEST // self.step * self.step)
        gap = (refused - self.largest) // unit
        return self.largest + gap // 2 * unit if gap > 1 else None


def largest_of(fits: Callable[[int], bool], *, step: int) -> int:
    """The largest batch that a search with this rule finds."""
    search = Search(step=step)
    while (samples := search.next()) is not None:
        search.known[samples] = fits(samples)
    return search.largest

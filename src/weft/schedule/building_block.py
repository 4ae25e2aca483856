"""Building blocks of `weave`: when each action of one micro-batch starts, on every rank of a V.

Rank `r` holds chunk `r`, on the way *down* the V, and chunk `2p-1-r`, on the way *up*. A block is four distances and
three gaps, in units of the forward of a chunk:

    F down   starts `a` later from rank to rank
    F up     starts `b` later from rank to rank, the first gap after F down on the last rank
    I down   starts `c` later (the gradient enters on rank 0), the second gap after F up
    I up     starts `d` later, the third gap after I down on the last rank
    W        of each chunk starts on a unit that is left over

Every micro-batch repeats the block of the one before it, six units later. If no two of a rank's actions fall on the
same unit modulo 6, every unit of every rank is used once: an order without a bubble, for ever. A whole backward takes
two units, which leaves none for W; then the distances differ from hop to hop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple, TypeAlias

PERIOD = 6  # units from one micro-batch to the next: F, I and W of two chunks

Hops: TypeAlias = "Sequence[int]"  # the distance of each hop; hop `h` is between ranks `h` and `h + 1`


class Passes(NamedTuple):
    """The starts of the four passes of one micro-batch on one rank."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


class ChunkTimes(NamedTuple):
    """When the actions of one micro-batch start in one chunk, and when its activations are free."""

    forward: int
    backward: int  # of the input gradient I, or of the whole backward B
    weight: int | None  # of W; None: the backward is whole
    retired: int

    @property
    def in_flight(self) -> int:
        """Micro-batches of the chunk between forward and retirement, once a forward has begun."""
        return self.held_at(self.forward)

    def held_at(self, unit: int) -> int:
        """Micro-batches of the chunk that are in flight during a unit."""
        return (unit - self.forward) // PERIOD - (unit - self.retired) // PERIOD


@dataclass(frozen=True, kw_only=True)
class BuildingBlock:
    """The starts of the passes of each rank (see the module docstring)."""

    passes: tuple[Passes, ...]
    split: bool

    @classmethod
    def of(cls, distances: Sequence[Hops], gaps: Sequence[int], *, split: bool) -> BuildingBlock:
        a, b, c, d = distances
        forward_down = list(accumulate(a, initial=0))
        forward_up = list(accumulate(reversed(b), initial=forward_down[-1] + gaps[0]))[::-1]
        backward_down = list(accumulate(c, initial=forward_up[0] + gaps[1]))
        backward_up = list(accumulate(reversed(d), initial=backward_down[-1] + gaps[2]))[::-1]
        return cls(
            passes=tuple(map(Passes, forward_down, forward_up, backward_down, backward_up)),
            split=split,
        )

    @property
    def stages(self) -> int:
        return len(self.passes)

    def fits(self) -> bool:
        """Whether no two of a rank's actions fall on the same unit modulo the period."""
        return all(len(self._used(rank)) == (4 if self.split else PERIOD) for rank in range(self.stages))

    def chunks(self, rank: int) -> tuple[ChunkTimes, ChunkTimes]:
        """The times of the chunks on the way down and up: with the W on the two units left, in the better order."""
        down, up, backward_down, backward_up = self.passes[rank]
        if not self.split:
            return (
                ChunkTimes(down, backward_up, None, backward_up + 2),
                ChunkTimes(up, backward_down, None, backward_down + 2),
            )
        left = set(range(PERIOD)) - self._used(rank)
        return min(
            (
                (_split_times(down, backward_up, of_down), _split_times(up, backward_down, of_up))
                for of_down, of_up in permutations(left)
            ),
            key=lambda pair: (peak_of(pair), pair[0].in_flight + pair[1].in_flight, pair[0].retired + pair[1].retired),
        )

    def chunk(self, number: int) -> ChunkTimes:
        """The times of a chunk by its number in the model."""
        rank = min(number, 2 * self.stages - 1 - number)
        return self.chunks(rank)[0 if number == rank else 1]

    def peak(self, rank: int) -> int:
        return peak_of(self.chunks(rank))

    @property
    def slack(self) -> float:
        """The time of a hop that is hidden, in forwards of a stage, which are two units.

        A chain of waits that could lengthen the period comes back to its rank, so it takes as many hops down as up:
        it hides twice a hop, if the least slack of a hop down and the least slack of a hop up do together.
        """
        backward, down, up = (1 if self.split else 2), math.inf, math.inf
        for above, below in pairwise(self.passes):
            down = min(down, below.forward_down - above.forward_down - 1)
            down = min(down, below.backward_down - above.backward_down - backward)
            up = min(up, above.forward_up - below.forward_up - 1)
            up = min(up, above.backward_up - below.backward_up - backward)
        return (down + up) / 4

    def _used(self, rank: int) -> set[int]:
        """The units modulo the period that the passes take; too few, if some coincide."""
        starts = self.passes[rank]
        units = starts if self.split else (*starts, starts.backward_down + 1, starts.backward_up + 1)
        return {unit % PERIOD for unit in units}


def _split_times(forward: int, backward: int, unit: int) -> ChunkTimes:
    """The times of a chunk whose W starts on the first such unit (modulo the period) after I."""
    weight = backward + 1 + (unit - backward - 1) % PERIOD
    return ChunkTimes(forward, backward, weight, weight + 1)


def peak_of(chunks: tuple[ChunkTimes, ChunkTimes]) -> int:
    """The largest number of micro-batches in flight on the rank of two chunks, each counted in each chunk."""
    return max(sum(other.held_at(chunk.forward) for other in chunks) for chunk in chunks)

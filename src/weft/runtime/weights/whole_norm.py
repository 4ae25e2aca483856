"""The norm of a mini-batch's whole gradient, where groups of chunks have a norm each. It is only reported.

Each chunk adds its part when it starts the norm of its group. No update waits for the total: ranks report it a cycle
after the last chunk's update, when it has usually arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from weft.runtime.device import HostCopy
from weft.runtime.weights.all_reduce import Group, GroupSums, Member, Parts, Sum


def counts_in_norm(member: Member, ties: Mapping[Member, Group]) -> bool:
    """Whether a parameter set counts in a norm; of tied ones, only the first does."""
    return member not in ties or ties[member].members[0] == member


class WholeNorm:
    """The norm of one mini-batch: known some time after the sum of its squares has arrived."""

    def __init__(self, squares: Sum) -> None:
        self.squares = squares
        self._copy: HostCopy | None = None
        squares.add_done_callback(self._take)

    def _take(self, squares: Future[Parts]) -> None:
        if squares.exception() is None:
            self._copy = HostCopy(squares.result())

    def is_known(self) -> bool:
        return self._copy is not None and self._copy.ready

    @property
    def value(self) -> float:
        assert self._copy is not None
        return math.sqrt(self._copy.numbers()[0])


@dataclass(frozen=True, kw_only=True)
class WholeNorms:
    """The norms of all mini-batches, each over all chunks of a replica.

    `after`: cycles from the start of a mini-batch's own one to the report of its norm.
    """

    groups: Mapping[Member, Group]
    ties: Mapping[Member, Group]
    after: float

    def add(self, sums: GroupSums, member: Member, minibatch: int, squares: Parts) -> WholeNorm:
        """Add the part of a parameter set, which is that of its group's norm."""
        part = squares if counts_in_norm(member, self.ties) else [torch.zeros_like(square) for square in squares]
        return WholeNorm(sums.add(self.groups[member], minibatch, member, part))

    def is_due(self, minibatch: int, cycle: float) -> bool:
        """Whether ranks report a mini-batch by the end of this cycle."""
        return minibatch + self.after < cycle + 1

"""The optimistic step: each update goes ahead by how much its change differs from that of the update before.

    W ← W + u + c (u - u')

u is the whole change that the optimizer makes at an update, with its momentum, weight decay and clipped gradients; u'
is the one that it made at the last update of the same parameter. The first update applies u alone. A gradient that is
one update late would have moved the weights by u' already; what it brings that is new, u - u', counts c times more. The
sum over many updates is hardly changed. It needs no delay, and helps synchronous training, too.

Zmushko et al.: a correction of this kind for 2BW's delay, 2026 (arXiv 2606.30634); known from optimistic gradient
methods for games (Daskalakis, Ilyas, Syrgkanis, Zeng: Training GANs with Optimism, ICLR 2018).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.tensors import by_kind, copy_tensors
from weft.runtime.update.cures.base import Cure, CurePart
from weft.runtime.update.part import PartState
from weft.schedule import Program, is_number


@dataclass(frozen=True, kw_only=True)
class Optimistic(Cure):
    """Apply `(1 + c) u - c u'` instead of `u`, in all chunks or in those with a delay.

    `c="stale"`: the mean delay of the chunk, which is its share of late micro-batches if none is more than one update
    late.
    """

    c: float | Literal["stale"] = 1.0
    chunks: Literal["all", "late"] = "all"

    def __post_init__(self) -> None:
        if self.c != "stale" and not (is_number(self.c) and 0 < self.c < math.inf):
            raise WeftError(f'Optimistic\'s c is a number above 0, or "stale" (got {self.c!r})')
        if self.chunks not in ("all", "late"):
            raise WeftError(f'Optimistic\'s chunks is "all" or "late" (got {self.chunks!r})')

    @property
    def remedy(self) -> str:
        return (
            f"use Optimistic(), which gives all chunks a number as c (here c={self.c!r} and chunks={self.chunks!r}; in "
            f"a job: schedule.c=1 and schedule.cured=all), or {super().remedy}"
        )

    def check(self, program: Program) -> None:
        if self.c == "stale" or self.chunks == "late":
            super().check(program)

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> CurePart | None:
        c = delay if self.c == "stale" else float(self.c)
        return _OptimisticSteps(live, c) if c > 0 and (delay > 0 or self.chunks == "all") else None


class _OptimisticSteps(CurePart):
    """Holds the last change of each parameter, and room for the weights before an update, which become the next."""

    def __init__(self, live: Sequence[Parameter], c: float) -> None:
        self._live, self._c = live, c
        self._changes: dict[int, Tensor] = {}  # by the number of the parameter; none before its first update
        self._room: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._changes.values(), *self._room.values()))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        moving = [index for index, parameter in enumerate(self._live) if parameter.grad is not None]
        for index in moving:
            if index not in self._room:
                self._room[index] = torch.empty_like(self._live[index])
        changes = [self._room[index] for index in moving]
        with torch.no_grad():
            copy_tensors(changes, [self._live[index] for index in moving])
        yield
        with torch.no_grad():
            for weights, change in by_kind([self._live[index] for index in moving], changes):
                torch._foreach_sub_(change, weights)
                torch._foreach_neg_(change)
            self._go_ahead([index for index in moving if index in self._changes])
        for index in moving:
            last = self._changes.pop(index, None)
            self._changes[index] = self._room.pop(index)
            if last is not None:
                self._room[index] = last

    def _go_ahead(self, moving: Sequence[int]) -> None:
        """Add what is new in the changes; overwrites the last ones."""
        rows = ([found[index] for index in moving] for found in (self._live, self._room, self._changes))
        for weights, change, last in by_kind(*rows):
            torch._foreach_sub_(last, change)
            torch._foreach_add_(weights, last, alpha=-self._c)

    def state(self) -> PartState:
        changes = [self._changes.get(index) for index in range(len(self._live))]
        return PartState(parameters=[None if change is None else {"change": change} for change in changes])

    def load(self, state: PartState, *, updates: int) -> None:
        self._changes.clear()  # before new ones are read
        self._room.clear()
        for index, saved in enumerate(state.parameters or ()):
            if saved is not None:
                self._changes[index] = saved["change"].to(self._live[index].device)  # numbers are read on the host

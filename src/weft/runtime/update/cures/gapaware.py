"""Gap-aware damping: each element of a gradient is divided by how far its weight has moved meanwhile.

    g / (1 + |W_met - W_read| / (lr_max · (G + ε)))

W_read is what the mini-batch's first forward read (predicted weights, where there is prediction), W_met what its
update is applied to. G is how long a step usually is, element by element: the root of the running mean of
((W_{t+1} - W_t) / lr_t)² over the updates before, with Adam's correction for its start at 0; for SGD with momentum,
these are its momentum buffers. lr_max is the largest rate so far. So a gap of one usual step halves the gradient.

Barkai, Hakimi, Schuster: Gap-Aware Mitigation of Gradient Staleness, ICLR 2020.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update.cures.base import Cure, Treatment, check_rates


@dataclass(frozen=True, kw_only=True)
class GapAware(Cure):
    """Damp stale gradients by the gap between the weights that they come from and those that they meet."""

    decay: float = 0.999  # of the running mean
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not (_is_number(self.decay) and 0 <= self.decay < 1):
            raise WeftError(f"GapAware's decay is a number from 0 up to, not including, 1 (got {self.decay!r})")
        if not (_is_number(self.eps) and 0 < self.eps < float("inf")):
            raise WeftError(f"GapAware's eps is a number above 0 (got {self.eps!r})")

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> Treatment:
        check_rates(optimizer, self)
        return _Damped(optimizer, live, self) if delay > self.above else Treatment()


class _Damped(Treatment):
    """Copies of what mini-batches on their way have read, and the usual steps.

    The copy of the oldest one serves twice: for the gap, and then to measure the step that is made.
    """

    def __init__(self, optimizer: Optimizer, live: Sequence[Parameter], how: GapAware) -> None:
        self._live, self._how = live, how
        groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        self._groups: list[dict[str, Any]] = [groups[id(one)] for one in live]
        self._largest = [0.0] * len(live)  # learning rate so far
        self._squares = [torch.zeros_like(one) for one in live]
        self._steps = [0] * len(live)  # in the running mean
        self._read: deque[list[Tensor]] = deque()
        self._spare: list[list[Tensor]] = []

    @property
    def nbytes(self) -> int:
        return (1 + len(self._read) + len(self._spare)) * sum(one.nbytes for one in self._live)

    @torch.no_grad()
    def read(self, weights: Sequence[Tensor]) -> None:
        copies = self._spare.pop() if self._spare else [torch.empty_like(one) for one in self._live]
        for copy, one in zip(copies, weights, strict=True):
            copy.copy_(one)
        self._read.append(copies)

    def skip(self) -> None:
        self._spare.append(self._read.popleft())

    def state(self, place: int) -> dict[str, Any] | None:
        return {"largest": self._largest[place], "steps": self._steps[place], "squares": self._squares[place]}

    @torch.no_grad()
    def resume(self, states: Sequence[dict[str, Any] | None], *, updates: int) -> None:
        for place, state in enumerate(states):
            self._largest[place] = 0.0 if state is None else state["largest"]
            self._steps[place] = 0 if state is None else state["steps"]
            self._squares[place].zero_() if state is None else self._squares[place].copy_(state["squares"])

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        copies = self._read.popleft()
        rates = [float(group["lr"]) for group in self._groups]
        moving = [place for place, one in enumerate(self._live) if one.grad is not None]
        with torch.no_grad():
            for place in moving:
                self._largest[place] = max(self._largest[place], rates[place])
                self._damp(place, copies[place])
                copies[place].copy_(self._live[place])
        yield
        with torch.no_grad():
            for place in moving:
                self._follow(place, copies[place], rates[place])
        self._spare.append(copies)

    def _damp(self, place: int, read: Tensor) -> None:
        """Divide a gradient by its gap; the copy of what was read is used up."""
        met, largest = self._live[place], self._largest[place]
        gradient = met.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise WeftError("GapAware damps a gradient element by element; use sparse=False, or leave cure out")
        if largest <= 0 or not self._steps[place]:  # nothing has moved
            return
        usual = self._squares[place] / (1 - self._how.decay ** self._steps[place])
        usual.sqrt_().add_(self._how.eps).mul_(largest)
        gradient.div_(read.sub_(met).abs_().div_(usual).add_(1))

    def _follow(self, place: int, before: Tensor, rate: float) -> None:
        """Take the step that was made into the running mean."""
        if rate > 0:
            step = before.sub_(self._live[place]).div_(rate).square_().mul_(1 - self._how.decay)
            self._squares[place].mul_(self._how.decay).add_(step)
            self._steps[place] += 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

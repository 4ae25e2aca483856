"""Gap-aware damping: each element of a gradient is divided by how far its weight has moved since the forward.

    g / (1 + |W_met - W_read| / (lr_max · (G + ε)))

W_read is what the first forward of the mini-batch read (predicted weights, if the method predicts), W_met what the
update is applied to; where passes read rounded weights, both are rounded, so that rounding alone makes no gap. G is the
typical step size of each element: the root of the running mean of ((W_{t+1} - W_t) / lr_t)² over the previous updates,
bias-corrected as in Adam; for SGD with momentum, these are the squared momentum buffers. lr_max is the largest rate so
far. So a gap of one typical step halves the gradient.

Barkai, Hakimi, Schuster: Gap-Aware Mitigation of Gradient Staleness, ICLR 2020.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.tensors import copy_tensors, in_batches
from weft.runtime.update.cures.base import WITHOUT, Cure, CurePart, check_rates
from weft.runtime.update.host_numbers import HostNumbers
from weft.runtime.update.part import PartState
from weft.schedule import is_number


@dataclass(frozen=True, kw_only=True)
class GapAware(Cure):
    """Damp stale gradients by the gap between the weights that the forward read and those that the update meets."""

    decay: float = 0.999  # of the running mean
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not (is_number(self.decay) and 0 <= self.decay < 1):
            raise WeftError(f"GapAware's decay is a number from 0 up to, not including, 1 (got {self.decay!r})")
        if not (is_number(self.eps) and 0 < self.eps < float("inf")):
            raise WeftError(f"GapAware's eps is a number above 0 (got {self.eps!r})")

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> CurePart | None:
        check_rates(optimizer, self)
        return _GapDamping(optimizer, live, self) if delay > self.above else None


class _GapDamping(CurePart):
    """Holds a copy of the weights that each mini-batch in flight has read, and the squared steps.

    The copy of the oldest mini-batch serves twice: for the gap, then to measure the step that is made.
    """

    def __init__(self, optimizer: Optimizer, live: Sequence[Parameter], cure: GapAware) -> None:
        self._live, self._cure = live, cure
        self._groups = optimizer.param_groups
        numbers = {id(parameter): number for number, group in enumerate(self._groups) for parameter in group["params"]}
        self._group_of = [numbers[id(parameter)] for parameter in live]
        self._numbers = [HostNumbers() for _ in self._groups]
        self._max_rates = [0.0] * len(live)
        self._squares = [torch.zeros_like(parameter) for parameter in live]
        self._steps = [0] * len(live)  # in the running mean
        self._dtypes = [parameter.dtype for parameter in live]  # that forwards read
        self._read: deque[list[Tensor]] = deque()
        self._spare: list[list[Tensor]] = []

    @property
    def nbytes(self) -> int:
        return (1 + len(self._read) + len(self._spare)) * sum(parameter.nbytes for parameter in self._live)

    @torch.no_grad()
    def first_read(self, weights: Sequence[Tensor]) -> None:
        copies = self._spare.pop() if self._spare else [torch.empty_like(parameter) for parameter in self._live]
        copy_tensors(copies, weights)
        self._dtypes = [weight.dtype for weight in weights]
        self._read.append(copies)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        copies = self._read.popleft()
        options = [numbers.options(group) for numbers, group in zip(self._numbers, self._groups, strict=True)]
        rates = [float(options[group]["lr"]) for group in self._group_of]
        moving = [index for index, parameter in enumerate(self._live) if parameter.grad is not None]
        for index in moving:
            self._max_rates[index] = max(self._max_rates[index], rates[index])
            if self._gradient(index).is_sparse:
                raise WeftError(f"GapAware damps a gradient element by element; use sparse=False, or {WITHOUT}")
        with torch.no_grad():
            for batch in self._batches(moving):
                self._damp(batch, copies)
                copy_tensors([copies[index] for index in batch], [self._live[index] for index in batch])
        yield
        with torch.no_grad():
            for batch in self._batches([index for index in moving if rates[index] > 0]):
                self._add_steps(batch, copies, rates)
        self._spare.append(copies)

    def skip(self) -> None:
        self._spare.append(self._read.popleft())

    def state(self) -> PartState:
        columns = zip(self._max_rates, self._steps, self._squares, strict=True)
        return PartState(
            parameters=[{"largest": rate, "steps": steps, "squares": squares} for rate, steps, squares in columns]
        )

    @torch.no_grad()
    def load(self, state: PartState, *, updates: int) -> None:
        for index, saved in enumerate(state.parameters or ()):
            self._max_rates[index] = 0.0 if saved is None else saved["largest"]
            self._steps[index] = 0 if saved is None else saved["steps"]
            self._squares[index].zero_() if saved is None else self._squares[index].copy_(saved["squares"])

    def _gradient(self, index: int) -> Tensor:
        gradient = self._live[index].grad
        assert gradient is not None
        return gradient

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        numbers = {id(self._live[index]): index for index in indices}
        for batch in in_batches([self._live[index] for index in indices]):
            yield [numbers[id(parameter)] for parameter in batch]

    def _damp(self, batch: Sequence[int], copies: Sequence[Tensor]) -> None:
        """Divide gradients by their gaps; overwrites the copies of what was read."""
        moved = [index for index in batch if self._max_rates[index] > 0 and self._steps[index]]
        if not moved:
            return
        scales = torch._foreach_div(
            [self._squares[index] for index in moved],
            [1 - self._cure.decay ** self._steps[index] for index in moved],
        )
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, self._cure.eps)
        torch._foreach_mul_(scales, [self._max_rates[index] for index in moved])
        gaps = [copies[index] for index in moved]
        torch._foreach_sub_(gaps, [self._live[index].to(self._dtypes[index]) for index in moved])
        torch._foreach_abs_(gaps)
        torch._foreach_div_(gaps, scales)
        torch._foreach_add_(gaps, 1)
        torch._foreach_div_([self._gradient(index) for index in moved], gaps)

    def _add_steps(self, batch: Sequence[int], copies: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Add the steps that were made to the running means; overwrites the copies of the weights before them."""
        steps, squares = [copies[index] for index in batch], [self._squares[index] for index in batch]
        torch._foreach_sub_(steps, [self._live[index] for index in batch])
        torch._foreach_div_(steps, [rates[index] for index in batch])
        torch._foreach_mul_(steps, steps)
        torch._foreach_mul_(steps, 1 - self._cure.decay)
        torch._foreach_mul_(squares, self._cure.decay)
        torch._foreach_add_(squares, steps)
        for index in batch:
            self._steps[index] += 1
